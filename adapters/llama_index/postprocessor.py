"""Ordering of a query's nodes."""

from __future__ import annotations

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from ragorder.adapters.llama_index.nodes import node_reorder, put_in_order
from ragorder.adapters.reorder import Key, Reorder, ScopeOf, Tokens
from ragorder.orderer import OrdererLike

__all__ = ["CacheOrderPostprocessor"]


class CacheOrderPostprocessor(BaseNodePostprocessor):
    """Node postprocessor that orders a query's nodes for the engine's prefix cache. Thread-safe.

        index.as_query_engine(node_postprocessors=[reranker, CacheOrderPostprocessor(orderer)])  # always last

    - `key`: a `NodeWithScore`'s identity besides its text (default: its node id).
    - `tokens`: its length in the prompt, in `MetadataMode.LLM`.
    - `scope`: the tenant, or a function of the QueryBundle (or None).

    Errors in these functions leave retrieval order, and the orderer counts them. Orderings count as served at once
    without a `FeedbackHandler`. `to_dict` leaves out the orderer: `from_dict(data, orderer=…)`. Deep copies share it.
    """

    _reorder: Reorder[NodeWithScore] = PrivateAttr()

    def __init__(
        self,
        orderer: OrdererLike,
        *,
        key: Key | None = None,
        tokens: Tokens | None = None,
        scope: ScopeOf = None,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager=callback_manager or CallbackManager())
        self._reorder = node_reorder(orderer, key, tokens, scope)

    @classmethod
    def class_name(cls) -> str:
        return "CacheOrderPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return put_in_order(self._reorder, nodes, query_bundle)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return put_in_order(self._reorder, nodes, query_bundle)
