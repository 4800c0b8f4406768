"""What LangChain's retriever and step have in common, and the step."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from operator import index
from typing import Any, Self

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable
from pydantic import BaseModel, ConfigDict, Field, SkipValidation

import ragorder
from ragorder.adapters.documents import name_of, order_items
from ragorder.adapters.langchain.feedback import hand_over
from ragorder.orderer import Orderer
from ragorder.orderer_like import OrdererLike

__all__ = ["CacheReorder", "InOrder"]


class InOrder(BaseModel):
    """What the retriever and the step have in common.

    A copy, deep or pickled, has an orderer of its own with the same settings, which knows nothing of the engine yet.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    orderer: SkipValidation[OrdererLike]
    key: Callable[[Document], Any] | None = None
    tokens: Callable[[Document], int] | None = None
    scope: str | Callable[[Mapping[str, Any]], Hashable] | None = None
    rank_key: str | None = None
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
        """The documents in their new order, and the ordering handed over to whom it may concern."""
        documents = list(documents)
        try:
            scope = self.scope(run_manager.metadata) if callable(self.scope) else self.scope
        except Exception as error:
            # A tenant who cannot be told must not be taken for another one, nor for none.
            ordering = self.orderer.fall_back([ragorder.Document("")] * len(documents), error)
        else:
            documents, ordering = order_items(self.orderer, documents, self._read, scope=scope)
        hand_over(
            ordering, [str(getattr(document, "page_content", "")) for document in documents], run_manager, self.orderer
        )
        return [self._ranked(*item) for item in zip(documents, ordering.permutation, strict=True)]

    def _read(self, document: Document) -> ragorder.Document:
        return ragorder.Document(
            name_of(document, document.id, self.key),
            document.page_content,
            None if self.tokens is None else index(self.tokens(document)),
            metadata=document.metadata or {},
        )

    def _ranked(self, document: Document, rank: int) -> Document:
        with suppress(Exception):
            if self.rank_key is not None and self.rank_key not in document.metadata:
                return document.model_copy(update={"metadata": {**document.metadata, self.rank_key: {"rank": rank}}})
        return document


class CacheReorder(
    InOrder,
    BaseDocumentCompressor,
    BaseDocumentTransformer,
    RunnableSerializable[Sequence[Document], list[Document]],
):
    """A step that puts documents in the order that reuses most of the engine's prefix cache: `retriever | reorder`.

    Thread-safe. It is a document transformer and compressor, too: it stands last in a `DocumentCompressorPipeline`, or
    alone as the compressor of a `ContextualCompressionRetriever`. Of more than `k` documents the best, which come
    first, are kept. All else is as described in `CacheOrderedRetriever`.
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
        """The documents in their new order, as a step of the run whose callbacks these are."""
        return self.invoke(documents, {"callbacks": callbacks})

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks = None
    ) -> list[Document]:
        """As `compress_documents`."""
        return await self.ainvoke(documents, {"callbacks": callbacks})

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """The documents in their new order."""
        return self.invoke(documents)

    async def atransform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """As `transform_documents`."""
        return await self.ainvoke(documents)

    def _reorder(self, documents: Sequence[Document], run_manager: Any) -> list[Document]:
        return self.put_in_order(documents[: self.k], run_manager)

    async def _areorder(self, documents: Sequence[Document], run_manager: Any) -> list[Document]:
        return self.put_in_order(documents[: self.k], run_manager)
