"""Retriever with its nodes in cache order."""

from __future__ import annotations

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from ragorder.adapters.llama_index.nodes import node_reorder, put_in_order
from ragorder.adapters.reorder import Key, ScopeOf, Tokens
from ragorder.orderer import OrdererLike

__all__ = ["CacheOrderRetriever"]


class CacheOrderRetriever(BaseRetriever):
    """Retriever that orders its nodes. Thread-safe.

        retriever = CacheOrderRetriever(index.as_retriever(), orderer)

    Options as for `CacheOrderPostprocessor`, which is better if a later component filters or sorts nodes.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        orderer: OrdererLike,
        *,
        key: Key | None = None,
        tokens: Tokens | None = None,
        scope: ScopeOf = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        # A retriever may have no callback manager before its first query.
        super().__init__(callback_manager=callback_manager or getattr(retriever, "callback_manager", None))
        self._retriever = retriever
        self._reorder = node_reorder(orderer, key, tokens, scope)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return put_in_order(self._reorder, self._retriever.retrieve(query_bundle), query_bundle)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return put_in_order(self._reorder, await self._retriever.aretrieve(query_bundle), query_bundle)

    # The wrapped retriever has resolved recursive nodes by its own rules.
    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        return nodes

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        return nodes

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}
