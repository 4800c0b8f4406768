"""LangChain: a retriever and a step of a chain that put documents in the order that the engine's cache wants.

retriever = CacheOrderedRetriever(retriever=store.as_retriever(), orderer=Orderer.for_vllm("http://host:8000"))
chain = {"context": retriever | join_texts, "question": RunnablePassthrough()} | prompt | llm
chain.invoke(question, config={"callbacks": [FeedbackHandler()]})
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

from ragorder.adapters.documents import degrade

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        BaseCallbackManager,
        CallbackManagerForRetrieverRun,
    )
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever, RetrieverLike
    from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnableSequence
    from langchain_core.runnables.base import RunnableBindingBase
    from langchain_core.runnables.config import ensure_config, var_child_runnable_config
    from langchain_core.runnables.configurable import RunnableConfigurableFields

    from ragorder.adapters.langchain.feedback import FeedbackHandler, abandon
    from ragorder.adapters.langchain.order import CacheReorder, InOrder
except ImportError as error:
    raise ImportError("ragorder.adapters.langchain needs langchain-core: pip install 'ragorder[langchain]'") from error

__all__ = ["CacheOrderedRetriever", "CacheReorder", "FeedbackHandler"]

_INSIDE = (
    "an ordered retriever stands inside another retriever, where its order does not reach the prompt, and orders "
    "nothing: put the CacheOrderedRetriever around the outer one"
)
# What EnsembleRetriever calls the retrievers inside it.
_PART = re.compile(r"retriever_\d+")


class CacheOrderedRetriever(InOrder, BaseRetriever):
    """A retriever whose documents come in the order that reuses most of the engine's prefix cache. Thread-safe.

    Wraps any `retriever`, be it a BaseRetriever or another Runnable from a question to documents. What is passed to
    `invoke` goes on to it, callbacks and what is configured included. It belongs around everything that filters or
    sorts documents, or searches more than once (compressors, ensembles, MultiQueryRetriever): inside another retriever
    it orders nothing, and its orderer is degraded. Around a chain that takes more than a question, as
    `create_history_aware_retriever` makes them, it is the chain `retriever | CacheReorder(…)`, for a BaseRetriever is
    asked questions only.

    The order must reach the prompt: join the documents' `page_content`, and put everything that varies behind them.
    Numbers in front of documents are those of their places in this order; ranks of retrieval would end the reuse.

    - `k`: so many of the retrieved documents at most, best first. `invoke(question, k=3)` also asks the wrapped
      retriever for so many, if it takes a `k`.
    - `key` gives what a document is known by besides its text (default: its id). Never its source, which chunks share.
    - `tokens` gives a document's length in the prompt, in tokens of the served model (default: what the orderer makes
      of a `ragorder.Document` with the same text and metadata).
    - `scope` is the tenant, or a function of the run's metadata (`invoke(question, config={"metadata": {…}})`) that
      names it: what differs in it shares no cache. A string is the `cache_salt` that the model is called with.
    - `rank_key` (default: None) asks for copies of the documents that bear their rank in retrieval, from 0, as
      metadata[rank_key]["rank"]; a document that has metadata of this name keeps it. Without it, the retriever's own
      documents come back, and nothing is added. Do not show the rank in the prompt.

    An error of ours, or in `key`, `tokens` or `scope`, leaves the documents in retrieval order and is counted by the
    orderer. Orderings count as served at once, unless a `FeedbackHandler` among the callbacks tells what became of
    them. A copy, deep or pickled, has an orderer of its own, which knows nothing of the engine yet.
    """

    retriever: RetrieverLike

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """A retriever; or the step behind one that takes more than a question, which a BaseRetriever cannot."""
        retriever: Any = options.get("retriever")
        if not _takes_a_mapping(retriever):
            return super().__new__(cls)
        config = {name: options.pop(name) for name in ("tags", "metadata") if name in options}
        del options["retriever"]
        return (retriever | CacheReorder(**options)).with_config(**config)

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        if _inside_another(config):
            degrade(self.orderer, _INSIDE)
            k = kwargs.pop("k", None)
            return self.retriever.invoke(input, config, **kwargs, **self._asked(k))[: self.k if k is None else k]
        with _configured(config):
            return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:
        if _inside_another(config):
            degrade(self.orderer, _INSIDE)
            k = kwargs.pop("k", None)
            documents = await self.retriever.ainvoke(input, config, **kwargs, **self._asked(k))
            return documents[: self.k if k is None else k]
        with _configured(config):
            return await super().ainvoke(input, config, **kwargs)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        kwargs |= self._asked(k)
        with _followed(run_manager):
            documents = self.retriever.invoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self.put_in_order(documents[: self.k if k is None else k], run_manager)

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        kwargs |= self._asked(k)
        with _followed(run_manager):
            documents = await self.retriever.ainvoke(query, config={"callbacks": run_manager.get_child()}, **kwargs)
        return self.put_in_order(documents[: self.k if k is None else k], run_manager)

    def _asked(self, k: int | None) -> dict[str, Any]:
        if k is not None and k < 0:
            raise ValueError(f"k must not be negative, got {k}")
        return {} if k is None or not _takes_k(self.retriever) else {"k": k}


def _inside_another(config: RunnableConfig | None) -> bool:
    """Whether it is another retriever that asks: each of its searches would count as a request of its own."""
    callbacks = ensure_config(config).get("callbacks")
    if not isinstance(callbacks, BaseCallbackManager):
        return False
    return "ls_retriever_name" in callbacks.inheritable_metadata or any(
        _PART.fullmatch(tag) for tag in callbacks.tags if tag not in callbacks.inheritable_tags
    )


def _takes_a_mapping(retriever: Any) -> bool:
    """Whether a runnable takes more than a question, as `create_history_aware_retriever` makes them."""
    if isinstance(retriever, BaseRetriever) or not isinstance(retriever, Runnable):
        return False
    try:
        schema: Any = retriever.get_input_schema()
        return bool(schema.model_json_schema().get("type") == "object")
    except Exception:
        # Of functions that are annotated with something that has no schema.
        return False


@contextmanager
def _configured(config: RunnableConfig | None) -> Iterator[None]:
    """Let the wrapped retriever see what the caller configured (a tenant's filter, say), as it would in a chain:
    BaseRetriever itself passes on nothing but callbacks, tags and metadata."""
    around = var_child_runnable_config.get() or RunnableConfig()
    token = var_child_runnable_config.set({**around, "configurable": ensure_config(config)["configurable"]})
    try:
        yield
    finally:
        var_child_runnable_config.reset(token)


@contextmanager
def _followed(run_manager: Any) -> Iterator[None]:
    """BaseRetriever tells its callbacks of errors, but not of a task that is cancelled."""
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
