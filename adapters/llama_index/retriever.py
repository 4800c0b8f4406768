"""Retriever and node postprocessor in cache order."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from ragorder.adapters.llama_index.feedback import hand_over
from ragorder.adapters.reorder import Key, Reorder, ScopeOf, Tokens
from ragorder.protocols import OrdererLike


# Not a lambda: a Reorder is pickled with it.
def node_text(node: NodeWithScore) -> str:
    return node.get_content(metadata_mode=MetadataMode.LLM)


def _node_reorder(orderer: OrdererLike, **options: Any) -> Reorder[NodeWithScore]:
    return Reorder(orderer, text=node_text, own_id=attrgetter("node_id"), metadata=attrgetter("metadata"), **options)


def _put_in_order(
    reorder: Reorder[NodeWithScore], nodes: list[NodeWithScore], query_bundle: QueryBundle | None
) -> list[NodeWithScore]:
    nodes, ordering = reorder(nodes, query_bundle)
    hand_over(ordering, reorder.orderer)
    return nodes


class CacheOrderPostprocessor(BaseNodePostprocessor):
    """Node postprocessor that orders a query's nodes for the engine's prefix cache. Thread-safe.

        index.as_query_engine(node_postprocessors=[reranker, CacheOrderPostprocessor(orderer)])  # always last

    - `key`: a `NodeWithScore`'s identity besides its text (default: its node id).
    - `tokens`: its length in the prompt, in `MetadataMode.LLM`.
    - `scope`: the tenant, or a function of the QueryBundle (or None).

    Errors in these functions are counted and leave retrieval order. Without a `FeedbackHandler` orderings count as
    served at once. `to_dict` leaves out the orderer: `from_dict(data, orderer=…)`. Deep copies share it.
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
        self._reorder = _node_reorder(orderer, key=key, tokens=tokens, scope=scope)

    @classmethod
    def class_name(cls) -> str:
        return "CacheOrderPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return _put_in_order(self._reorder, nodes, query_bundle)

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        return _put_in_order(self._reorder, nodes, query_bundle)


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
        self._reorder = _node_reorder(orderer, key=key, tokens=tokens, scope=scope)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _put_in_order(self._reorder, self._retriever.retrieve(query_bundle), query_bundle)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _put_in_order(self._reorder, await self._retriever.aretrieve(query_bundle), query_bundle)

    # The wrapped retriever has resolved recursive nodes by its own rules.
    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        return nodes

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        return nodes

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}
