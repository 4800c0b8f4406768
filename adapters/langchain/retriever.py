"""Retriever and chain step with documents in cache order."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from operator import attrgetter
from typing import Any, Self

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackManager,
    CallbackManagerForRetrieverRun,
    Callbacks,
)
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.retrievers import BaseRetriever, RetrieverLike
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSequence, RunnableSerializable
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import ensure_config, var_child_runnable_config
from langchain_core.runnables.configurable import RunnableConfigurableFields
from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from ragorder.adapters.langchain.feedback import abandon, hand_over
from ragorder.adapters.marks import marked_documents
from ragorder.adapters.reorder import Reorder
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.protocols import OrdererLike

_INSIDE = (
    "a CacheOrderRetriever inside another retriever orders nothing, because its order does not reach the prompt: wrap "
    "the outer retriever with it"
)
# Tags that EnsembleRetriever gives its retrievers.
_PART = re.compile(r"retriever_\d+")


class CacheOrderModel(BaseModel):
    """Common fields. Deep and pickled copies have a new orderer."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    orderer: SkipValidation[OrdererLike]
    key: Callable[[Document], Any] | None = None
    tokens: Callable[[Document], int] | None = None
    scope: str | Callable[[Mapping[str, Any]], Hashable] | None = None
    rank_key: str | None = None
    mark_key: str | None = None
    k: int | None = Field(default=None, ge=0)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.orderer)] = Orderer(self.orderer.settings)
        return super().__deepcopy__(memo)

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        return state | {"__dict__": state["__dict__"] | {"orderer": self.orderer.settings}}

    def __setstate__(self, state: dict[Any, Any]) -> None:
        fields = state["__dict__"]
        super().__setstate__(state | {"__dict__": fields | {"orderer": Orderer(fields["orderer"])}})

    def put_in_order(self, documents: Sequence[Document], run_manager: Any) -> list[Document]:
        reorder = Reorder(
            self.orderer,
            text=attrgetter("page_content"),
            own_id=attrgetter("id"),
            metadata=lambda document: document.metadata or {},
            key=self.key,
            tokens=self.tokens,
            scope=self.scope,
        )
        documents, ordering = reorder(documents, run_manager.metadata)
        marked = self._marked(ordering)
        texts = [str(getattr(document, "page_content", "")) for document in documents]
        hand_over(ordering, texts, run_manager, self.orderer)
        ranked = zip(documents, ordering.permutation, strict=True)
        return [self._annotated(document, rank, place in marked) for place, (document, rank) in enumerate(ranked, 1)]

    def _annotated(self, document: Document, rank: int, marked: bool) -> Document:
        with suppress(Exception):
            metadata = dict(document.metadata)
            if self.rank_key is not None:
                metadata.setdefault(self.rank_key, {"rank": rank})
            if self.mark_key is not None and not marked:
                # A breakpoint of an earlier request does not belong to this one.
                metadata.pop(self.mark_key, None)
            elif self.mark_key is not None:
                metadata.setdefault(self.mark_key, True)
            if metadata.keys() != document.metadata.keys():
                return document.model_copy(update={"metadata": metadata})
        return document

    def _marked(self, ordering: Ordering[Any]) -> frozenset[int]:
        if self.mark_key is None:
            return frozenset()
        try:
            return frozenset(marked_documents(ordering))
        except Exception as error:
            self.orderer.degrade(f"no cache breakpoints were set: choosing them failed with {type(error).__name__}")
            return frozenset()


class CacheOrderTransformer(
    CacheOrderModel,
    BaseDocumentCompressor,
    BaseDocumentTransformer,
    RunnableSerializable[Sequence[Document], list[Document]],
):
    """Chain step or compressor that orders documents. Thread-safe.

        chain = retriever | CacheOrderTransformer(orderer) | join_texts

    Options as for `CacheOrderRetriever`.
    """

    def __init__(self, orderer: OrdererLike, **options: Any) -> None:
        super().__init__(orderer=orderer, **options)

    def invoke(self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        return self._call_with_config(self._reorder, input, config)

    async def ainvoke(
        self, input: Sequence[Document], config: RunnableConfig | None = None, **kwargs: Any
    ) -> list[Document]:
        return await self._acall_with_config(self._areorder, input, config)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> list[Document]:
        return self.invoke(documents, {"callbacks": callbacks})

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> list[Document]:
        return await self.ainvoke(documents, {"callbacks": callbacks})

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        return self.invoke(documents)

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        return await self.ainvoke(documents)

    def _reorder(self, documents: Sequence[Document], run_manager: Any) -> list[Document]:
        return self.put_in_order(documents[: self.k], run_manager)

    async def _areorder(self, documents: Sequence[Document], run_manager: Any) -> list[Document]:
        return self.put_in_order(documents[: self.k], run_manager)


class CacheOrderRetriever(CacheOrderModel, BaseRetriever):
    """Retriever that orders its documents for the engine's prefix cache. Thread-safe.

        retriever = CacheOrderRetriever(retriever=store.as_retriever(), orderer=orderer, k=5)

    Wrap the outermost retriever: inside another this class orders nothing and degrades its orderer. A chain that takes
    a mapping becomes `retriever | CacheOrderTransformer(…)`.

    - `k`: the most documents; `invoke(question, k=3)` passes k on.
    - `key`: a document's identity besides its text (default: its id). Not its source, which chunks share.
    - `tokens`: its length in the prompt.
    - `scope`: the tenant, or a function of the run's metadata. A string is the `cache_salt`.
    - `rank_key`: copies have the retrieval rank, from 0, as metadata[rank_key]["rank"]: not for the prompt.
    - `mark_key`: copies before a cache breakpoint (Anthropic, Bedrock) have metadata[mark_key], for `content_parts`;
      the orderer then takes `feedback=False`.

    Errors in these functions are counted and leave retrieval order. Orderings count as served at once without a
    `FeedbackHandler`.
    """

    retriever: RetrieverLike

    def __new__(cls, retriever: Any = None, *orderer: OrdererLike, **options: Any) -> Any:
        # A BaseRetriever takes a question only.
        if not _takes_a_mapping(retriever):
            return super().__new__(cls)
        config = {name: options.pop(name) for name in ("tags", "metadata") if name in options}
        return (retriever | CacheOrderTransformer(*orderer, **options)).with_config(**config)

    def __init__(self, retriever: RetrieverLike, orderer: OrdererLike, **options: Any) -> None:
        fields: dict[str, Any] = {"retriever": retriever, "orderer": orderer}
        super().__init__(**fields, **options)

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        if _inside_another(config):
            self.orderer.degrade(_INSIDE)
            most, options = self._limited(kwargs)
            return self.retriever.invoke(input, config, **options)[:most]
        with _configured(config):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        if _inside_another(config):
            self.orderer.degrade(_INSIDE)
            most, options = self._limited(kwargs)
            return (await self.retriever.ainvoke(input, config, **options))[:most]
        with _configured(config):
            return await super().ainvoke(input, config, **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        most, options = self._limited(kwargs)
        with _followed(run_manager):
            documents = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **options)
        return self.put_in_order(documents[:most], run_manager)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        most, options = self._limited(kwargs)
        with _followed(run_manager):
            documents = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **options)
        return self.put_in_order(documents[:most], run_manager)

    def _limited(self, options: dict[str, Any]) -> tuple[int | None, dict[str, Any]]:
        k = options.pop("k", None)
        if k is None:
            return self.k, options
        if k < 0:
            raise ValueError(f"k is {k}: give 0 or more")
        return k, options | ({"k": k} if _takes_k(self.retriever) else {})


def _inside_another(config: RunnableConfig | None) -> bool:
    # Each search of an outer retriever would count as a request of its own.
    callbacks = ensure_config(config).get("callbacks")
    if not isinstance(callbacks, BaseCallbackManager):
        return False
    return "ls_retriever_name" in callbacks.inheritable_metadata or any(
        _PART.fullmatch(tag) for tag in callbacks.tags if tag not in callbacks.inheritable_tags
    )


def _takes_a_mapping(retriever: Any) -> bool:
    if isinstance(retriever, BaseRetriever) or not isinstance(retriever, Runnable):
        return False
    try:
        schema: Any = retriever.get_input_schema()
        return bool(schema.model_json_schema().get("type") == "object")
    except Exception:
        # Functions with annotations that have no schema.
        return False


@contextmanager
def _configured(config: RunnableConfig | None) -> Iterator[None]:
    # BaseRetriever passes on callbacks, tags and metadata only: not the configuration, such as a tenant's filter.
    around = var_child_runnable_config.get() or RunnableConfig()
    token = var_child_runnable_config.set({**around, "configurable": ensure_config(config)["configurable"]})
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


@contextmanager
def _followed(run_manager: Any) -> Iterator[None]:
    # BaseRetriever reports errors to its callbacks, but not cancellation.
    try:
        yield
    except Exception:
        raise
    except BaseException:
        abandon(run_manager)
        raise


def _takes_k(retriever: Runnable[Any, Any]) -> bool:
    if isinstance(retriever, RunnableBindingBase):
        return _takes_k(retriever.bound)
    if isinstance(retriever, RunnableConfigurableFields):
        return _takes_k(retriever.default)
    if isinstance(retriever, RunnableSequence):
        return _takes_k(retriever.first)
    function: Any = None
    if isinstance(retriever, BaseRetriever):
        function = retriever._get_relevant_documents
    elif isinstance(retriever, RunnableLambda):
        function = getattr(retriever, "func", None) or retriever.afunc
    try:
        parameters = signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "k" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
