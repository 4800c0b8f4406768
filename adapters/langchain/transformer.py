"""Chain step for ordering documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, BaseDocumentTransformer, Document
from langchain_core.runnables import RunnableConfig, RunnableSerializable

from ragorder.adapters.langchain.base import CacheOrderModel
from ragorder.orderer import OrdererLike

__all__ = ["CacheOrderTransformer"]


class CacheOrderTransformer(
    CacheOrderModel,
    BaseDocumentCompressor,
    BaseDocumentTransformer,
    RunnableSerializable[Sequence[Document], list[Document]],
):
    """Chain step that orders documents, also as a compressor. Thread-safe. Options as for `CacheOrderRetriever`.

    chain = retriever | CacheOrderTransformer(orderer) | join_texts
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
