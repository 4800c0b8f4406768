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


def check_sound(orderer: Orderer) -> None:
    """Trees, counts and leases of all scopes add up."""
    scopes, pool = scopes_of(orderer), scopes_of(orderer).pool
    doomed = getattr(pool, "doomed", {})
    whole = [scope for scope in scopes.values() if scope.whole]
    for scope in whole:
        mirror, nodes = scope.mirror, list(scope.tree.walk())
        assert scope.tree.size == len(nodes) - 1 == mirror.counted_nodes
        for node in nodes:
            assert node.leases >= 0 and 0 <= node.missing <= node.blocks
            assert not (node.missing and any(child not in doomed for child in (node.children or {}).values()))
            assert node.parent is None or (node.parent.children or {})[node.key] is node
        in_flight = [lease for holder, lease in pool.in_flight if holder is mirror and lease.open]
        assert scope.tree.root.leases == len(in_flight)
        held = sum(node.blocks - node.missing for node in nodes)
        held += sum(use.suffix_blocks for use in pool.log if use.holder is mirror)
        held += sum(lease.suffix_blocks + lease.partial_blocks for lease in in_flight)
        assert mirror.used_blocks == held == mirror.counted_blocks <= pool.capacity_blocks
    if len(whole) == len(scopes):
        assert pool.nodes == sum(scope.mirror.counted_nodes for scope in whole)
        others = sum(use.suffix_blocks for use in pool.log if use.holder is None)
        assert pool.used_blocks == sum(scope.mirror.counted_blocks for scope in whole) + others
        assert set(pool.holders) == {scope.mirror for scope in whole}


def check_idle(orderer: Orderer) -> None:
    """Sound, and no request is in flight."""
    check_sound(orderer)
    assert all(not node.leases for scope in scopes_of(orderer).values() for node in scope.tree.walk())
