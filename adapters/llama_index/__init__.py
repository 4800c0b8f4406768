"""LlamaIndex: a node postprocessor and a retriever that put nodes in the order that the engine's cache wants."""

from __future__ import annotations

from typing import Any

try:
    from llama_index.core.base.base_retriever import BaseRetriever
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.prompts.mixin import PromptMixinType
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

    from ragorder.adapters.llama_index.feedback import FeedbackHandler, finish
except ImportError as error:
    raise ImportError(
        "ragorder.adapters.llama_index needs llama-index-core: pip install 'ragorder[llama-index]'"
    ) from error

from ragorder.adapters.reorder import Key, Reorder, ScopeOf, Tokens
from ragorder.orderer_like import OrdererLike

__all__ = ["CacheOrderPostprocessor", "CacheOrderedRetriever", "FeedbackHandler"]


class CacheOrderPostprocessor(BaseNodePostprocessor):
    """Puts a query's nodes in the order that reuses most of the engine's prefix cache. Thread-safe.

    It belongs **last** among the `node_postprocessors`: what sorts the nodes behind it, like `LongContextReorder`,
    undoes it. The nodes come back as they are, each as often as it was given; nothing but their order changes.

    - `key` gives what a `NodeWithScore` is known by besides its text (default: its node id).
    - `tokens` gives its length in the prompt, in tokens (default: four characters a token). The text of a node is what
      LlamaIndex shows the model: `MetadataMode.LLM`.
    - `scope` is the tenant, or a function of the QueryBundle (None if there is none) that names it: what differs in it
      shares no cache.

    An error of ours, or in `key`, `tokens` or `scope`, leaves the nodes in retrieval order and is counted by the
    orderer. Orderings count as served at once, unless a `FeedbackHandler` at LlamaIndex's dispatcher tells what became
    of them.

    It serialises as other components do: `to_dict` says its class, not the orderer, which lives with the engine, nor
    the functions. `from_dict(data, orderer=…)` gives it one again. Deep copies share the orderer.
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
        self._reorder = _reorder(orderer, key, tokens, scope)

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


class CacheOrderedRetriever(BaseRetriever):
    """A retriever whose nodes come in the order that reuses most of the engine's prefix cache. Thread-safe.

    Wraps any `retriever`, whose callbacks and spans go on as they were; everything else is as described in
    `CacheOrderPostprocessor`, which is the better place if anything behind the retriever filters or sorts nodes.
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
        # LlamaIndex lets retrievers do without one until they are asked.
        super().__init__(callback_manager=callback_manager or getattr(retriever, "callback_manager", None))
        self._retriever = retriever
        self._reorder = _reorder(orderer, key, tokens, scope)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _put_in_order(self._reorder, self._retriever.retrieve(query_bundle), query_bundle)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return _put_in_order(self._reorder, await self._retriever.aretrieve(query_bundle), query_bundle)

    # What nodes stand for has been looked up by the wrapped retriever, by its own rules.
    def _handle_recursive_retrieval(self, query_bundle: QueryBundle, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        return nodes

    async def _ahandle_recursive_retrieval(
        self, query_bundle: QueryBundle, nodes: list[NodeWithScore]
    ) -> list[NodeWithScore]:
        return nodes

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}


def _reorder(orderer: OrdererLike, key: Key | None, tokens: Tokens | None, scope: ScopeOf) -> Reorder[NodeWithScore]:
    return Reorder(orderer, text=_text, own_id=_node_id, metadata=_metadata, key=key, tokens=tokens, scope=scope)


def _put_in_order(
    reorder: Reorder[NodeWithScore], nodes: list[NodeWithScore], query_bundle: QueryBundle | None
) -> list[NodeWithScore]:
    nodes, ordering = reorder(nodes, query_bundle)
    finish(ordering, reorder.orderer)
    return nodes


def _text(node: NodeWithScore) -> str:
    return node.get_content(metadata_mode=MetadataMode.LLM)


def _node_id(node: NodeWithScore) -> str:
    return node.node_id


def _metadata(node: NodeWithScore) -> dict[str, Any]:
    return node.metadata
