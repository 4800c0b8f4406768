"""Ordering of LlamaIndex's nodes."""

from __future__ import annotations

from typing import Any

from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle

from ragorder.adapters.llama_index.feedback import hand_over
from ragorder.adapters.reorder import Key, Reorder, ScopeOf, Tokens
from ragorder.orderer import OrdererLike

__all__ = ["node_reorder", "put_in_order"]


def node_reorder(
    orderer: OrdererLike, key: Key | None, tokens: Tokens | None, scope: ScopeOf
) -> Reorder[NodeWithScore]:
    return Reorder(orderer, text=_text, own_id=_node_id, metadata=_metadata, key=key, tokens=tokens, scope=scope)


def put_in_order(
    reorder: Reorder[NodeWithScore], nodes: list[NodeWithScore], query_bundle: QueryBundle | None
) -> list[NodeWithScore]:
    nodes, ordering = reorder(nodes, query_bundle)
    hand_over(ordering, reorder.orderer)
    return nodes


# Functions of this module, not lambdas: a Reorder is pickled with them.
def _text(node: NodeWithScore) -> str:
    return node.get_content(metadata_mode=MetadataMode.LLM)


def _node_id(node: NodeWithScore) -> str:
    return node.node_id


def _metadata(node: NodeWithScore) -> dict[str, Any]:
    return node.metadata
