"""Orderers of documents with one letter each, what may be drawn for them, and what always holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import strategies as st

from ragorder import Document, Orderer, Ordering
from ragorder.scope.scopes import MAX_NODES
from support.inside import scopes_of

SEARCHES = ["best", "greedy"]
MOVES = ["earned", "free", "prefix", "cohort", "queue"]

REQUESTS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6)
STREAMS = st.lists(REQUESTS, max_size=20)
OPTIONS = st.fixed_dictionaries(
    {
        "capacity_tokens": st.sampled_from([None, 1, 100, 400, 100_000]),
        "block_size": st.sampled_from([1, 16]),
        "prefix_tokens": st.sampled_from([0, 40]),
        "search": st.sampled_from(SEARCHES),
        "moves": st.sampled_from(MOVES),
        "residency": st.sampled_from(["lru", "none"]),
        "keep_first": st.integers(0, 2),
        "max_displacement": st.none() | st.integers(0, 3),
        "keep_groups": st.booleans(),
        "max_nodes": st.sampled_from([3, 100_000]),
        "best": st.sampled_from(["any", "first", "last"]),
        "best_tokens": st.sampled_from([0, 32, 1000]),
    }
).map(lambda options: options | {"keep_first": 0} if options["best"] == "last" else options)


def documents(ids: Sequence[str], tokens: int = 32) -> list[Document]:
    """Fresh documents with these ids."""
    return [Document(id, f"text of {id}", tokens=tokens) for id in ids]


def ids(ordering: Ordering[Document]) -> str:
    return "".join(document.id for document in ordering.documents)


def strict(*, max_nodes: int = MAX_NODES, **options: Any) -> Orderer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ragorder.scope.scopes.MAX_NODES", max_nodes)
        return Orderer(strict=True, **options)


def serve(orderer: Orderer, *requests: Sequence[str], **options: Any) -> str:
    """Serve requests one after another; the order of the last one's documents."""
    last = ""
    for request in requests:
        ordering = orderer.order(documents(request), **options)
        ordering.confirm()
        last = ids(ordering)
    return last


def check_permutation(ordering: Ordering[Any], retrieved: Sequence[Any]) -> None:
    """The caller's own objects, each as often as it was retrieved, and `permutation` says which stands where."""
    assert sorted(ordering.permutation) == list(range(len(retrieved)))
    assert len(ordering.documents) == len(retrieved)
    assert all(placed is retrieved[rank] for placed, rank in zip(ordering.documents, ordering.permutation, strict=True))
    assert 0 <= ordering.prefix_documents <= len(retrieved)
    assert ordering.cached_tokens >= 0
    assert ordering.guard_cost_tokens >= 0


def check_tree(orderer: Orderer, scope: object = None, *, idle: bool = True) -> None:
    residency = scopes_of(orderer)[scope].mirror
    tree = residency.tree
    nodes = list(tree.walk())
    assert tree.size == len(nodes) - 1
    for node in nodes:
        assert 0 <= node.missing <= node.blocks
        assert not (node.missing and node.children)
        assert node.leases >= 0
        assert not (idle and node.leases)
    held = sum(node.blocks - node.missing for node in nodes)
    assert held <= residency.used_blocks <= residency.pool.capacity_blocks
