"""Pool: the scopes of one engine are evicted in one order; a damaged or forgotten one harms no other."""

from __future__ import annotations

import pytest

from ragorder.trie.residency import FeedbackResidency, Lease, LRUResidency, Pool
from ragorder.trie.tree import KnowledgeTree

BLOCK = 16


def make(pool: Pool, count: int = 2) -> list[LRUResidency]:
    return [LRUResidency(KnowledgeTree(BLOCK), pool) for _ in range(count)]


def start(residency: LRUResidency | FeedbackResidency, documents: str, blocks: int = 2) -> Lease:
    path = residency.tree.insert(documents, [blocks * BLOCK] * len(documents), range(len(documents)))
    return residency.lease(path, 0)


def serve(residency: LRUResidency, documents: str, blocks: int = 2) -> None:
    residency.release(start(residency, documents, blocks))


def held(residency: LRUResidency) -> int:
    return sum(node.blocks - node.missing for node in residency.tree.walk())


class TestForgotten:
    def test_what_a_forgotten_scope_held_takes_room_until_it_is_the_oldest(self) -> None:
        pool = Pool(10 * BLOCK, BLOCK)
        one, other = make(pool)
        serve(one, "abc")
        serve(other, "d")
        one.close()
        assert (pool.used_blocks, pool.nodes) == (8, 1)
        serve(other, "ef")
        assert (held(other), pool.used_blocks) == (6, 10)
        serve(other, "gh")
        assert (held(other), pool.used_blocks) == (10, 10)

    def test_its_request_ends_without_effect(self) -> None:
        pool = Pool(10 * BLOCK, BLOCK)
        one, other = make(pool)
        lease = start(one, "abc")
        one.close()
        serve(other, "de")
        assert pool.used_blocks == 10
        one.cancel(lease)
        assert pool.used_blocks == 10
        serve(other, "fgh")
        assert pool.used_blocks == held(other) == 10

    @pytest.mark.parametrize("counted", [True, False])
    def test_one_that_an_interrupt_left_damaged_is_forgotten_when_its_turn_comes(self, counted: bool) -> None:
        pool = Pool(10 * BLOCK, BLOCK)
        one, other, third = make(pool, 3)
        serve(one, "ab")
        serve(other, "cd")
        one.whole = False
        one.used_blocks += 3
        if not counted:
            pool.used_blocks += 3
        serve(third, "ef")
        assert one.closed and not other.closed and not third.closed
        assert (held(other), held(third)) == (4, 4)
        assert pool.used_blocks <= 10
        serve(third, "gh")
        assert pool.used_blocks == held(other) + held(third) == 10


class TestCopy:
    def test_others_keep_their_room_and_their_turn(self) -> None:
        pool = Pool(12 * BLOCK, BLOCK)
        one, other, third = make(pool, 3)
        serve(one, "ab")
        serve(other, "cd")
        pinned = start(third, "e")
        copy = one.copy()
        serve(copy, "fg")
        assert (held(copy), copy.pool.used_blocks) == (6, 10), "two of its own are gone, and none of the others'"
        serve(copy, "hi")
        assert (held(copy), copy.pool.used_blocks) == (8, 10), "now those of the second"
        assert pinned.open
        assert (held(one), held(other), held(third), pool.used_blocks) == (4, 4, 2, 10), "and nothing of this is real"
