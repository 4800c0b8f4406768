"""Batches of requests taken in a given order, each as large as the KV cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ragorder import Orderer
from ragorder.benchmarks.doll.batch_kv.record import ANSWER_TOKENS, SUFFIX_TOKENS
from ragorder.document import Document

__all__ = ["POLICIES", "Served", "fill", "measure"]

Served = Sequence[Sequence[Document]]
"""Documents of each request in the prompt's order, in serving order."""


def fill(requests: Iterable[Sequence[Document]], capacity_tokens: int, *, shared: bool) -> tuple[list[int], int]:
    """Sizes of the batches, and tokens of KV in all of them. A batch's KV is its trie if `shared`: a document behind
    the same documents counts once; else the sum of its prompts. A request that is larger than the cache has a batch of
    its own."""
    sizes: list[int] = []
    nodes: dict[tuple[int, str], int] = {}
    held = total = 0
    for documents in requests:
        added, path = _added(nodes, documents, shared=shared)
        if sizes and held + added > capacity_tokens:
            nodes, held = {}, 0
            added, path = _added(nodes, documents, shared=shared)
            sizes.append(0)
        if not sizes:
            sizes.append(0)
        for step in path:
            nodes.setdefault(step, len(nodes) + 1)
        sizes[-1] += 1
        held += added
        total += added
    return sizes, total


def _added(
    nodes: dict[tuple[int, str], int], documents: Sequence[Document], *, shared: bool
) -> tuple[int, list[tuple[int, str]]]:
    """Tokens that a request adds to a batch, and the steps of its path. The root is 0."""
    tokens, here, known = SUFFIX_TOKENS, 0, shared
    path: list[tuple[int, str]] = []
    fresh = len(nodes)
    for document in documents:
        step = (here, document.key)
        found = nodes.get(step) if known else None
        if found is None:
            known = False
            tokens += document.token_count
            fresh += 1
            found = fresh
        if shared:
            path.append(step)
        here = found
    return tokens, path


def measure(policy: str, requests: Served, capacity_tokens: int) -> tuple[list[int], dict[str, Any]]:
    """Sizes of the batches, and facts: tokens of prompts and answers served, and KV tokens held for them."""
    order, shared = POLICIES[policy]
    sizes, kv_tokens = fill(order(requests, capacity_tokens), capacity_tokens, shared=shared)
    served = sum(each.token_count for request in requests for each in request) + len(requests) * SUFFIX_TOKENS
    return sizes, {
        "served_tokens": served,
        "kv_tokens": kv_tokens,
        "capacity_tokens": capacity_tokens,
        "steps": len(sizes) * ANSWER_TOKENS,
    }


def _by_rank(requests: Served, capacity_tokens: int) -> Iterable[Sequence[Document]]:
    return requests


def _one_by_one(requests: Served, capacity_tokens: int) -> Iterable[Sequence[Document]]:
    orderer = Orderer(capacity_tokens=capacity_tokens, suffix_tokens=SUFFIX_TOKENS)
    for documents in requests:
        ordering = orderer.order(documents)
        yield ordering.documents
        ordering.confirm()


def _as_batch(requests: Served, capacity_tokens: int) -> Iterable[Sequence[Document]]:
    orderer = Orderer(capacity_tokens=capacity_tokens, suffix_tokens=SUFFIX_TOKENS)
    for ordering in orderer.order_batch(requests):
        yield ordering.documents
        ordering.confirm()


POLICIES: dict[str, tuple[Callable[[Served, int], Iterable[Sequence[Document]]], bool]] = {
    "sum": (_by_rank, False),
    "retrieval": (_by_rank, True),
    "order": (_one_by_one, True),
    "order_batch": (_as_batch, True),
}
"""The order of documents and requests, and whether KV is shared."""
