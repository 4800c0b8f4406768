"""Steps and memory of an orderer are bounded, however many documents and requests come."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from itertools import accumulate, product
from typing import Any

import pytest
from support.inside import scopes_of
from support.orders import (
    MOVES,
    SEARCHES,
    check_permutation,
    strict,
)
from support.rings import grid, length
from support.waiting import counted_lines

from ragorder import Document

BLOCK = 16
GUARDS: list[dict[str, Any]] = [
    {"keep_first": 200},
    {"keep_last": 200},
    {"max_displacement": 0},
    {"max_displacement": 3},
    {"max_displacement": 2_000},
    {"keep_groups": True},
    {"keep_first": 3, "max_displacement": 100, "keep_groups": True},
    {"keep_last": 3, "max_displacement": 100, "keep_groups": True},
    {"max_gain_lost": 0.1},
]


LARGE = [Document(f"d{number}", "", tokens=10) for number in range(10_000)]


class TestManyDocuments:
    @pytest.mark.parametrize(
        ("search", "options", "queue"),
        [
            *grid(list(product(SEARCHES, [{"moves": moves} for moves in MOVES], [False, True])), 3),
            *((search, guards, False) for search, guards in grid(list(product(SEARCHES, GUARDS)), 9)),
        ],
    )
    def test_steps_grow_no_faster_than_documents(
        self, search: str, options: dict[str, Any], queue: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ragorder.scope.scope.SEARCH_BUDGET", 64)
        steps = []
        for count in (1_000, 4_000):
            orderer = strict(search=search, capacity_tokens=1_000_000, group=lambda each: each.id[-2:], **options)
            waiting = [LARGE[:count:step] for step in range(1, 9)] if queue else []
            with counted_lines() as lines:
                for retrieved in (LARGE[:count], LARGE[:count][::-1]):
                    ordering = orderer.order(retrieved, waiting=waiting)
                    ordering.confirm()
            check_permutation(ordering, retrieved)
            steps += lines
        assert steps[1] <= 4 * 1.5 * steps[0]

    def test_steps_of_a_batch_grow_no_faster_than_documents(self) -> None:
        steps = []
        for count in (2_500, 10_000):
            orderer = strict(capacity_tokens=1_000_000)
            with counted_lines() as lines:
                batch = orderer.order_batch([LARGE[:count], LARGE[:count][::-1], LARGE[:count:2]])
            assert list(batch)[1].prefix_documents >= count // 2
            steps += lines
        assert steps[1] <= 4 * 1.5 * steps[0]


class TestMemory:
    @staticmethod
    def requests(count: int, corpus: int, seed: int = 0) -> Iterator[list[Document]]:
        """Fresh documents for each request, of Zipf popularity."""
        rng = random.Random(seed)
        weights = list(accumulate(1 / (rank + 1) for rank in range(corpus)))
        for _ in range(count):
            drawn = dict.fromkeys(rng.choices(range(corpus), cum_weights=weights, k=5))
            yield [Document(f"document {number}", f"text of {number}", tokens=20) for number in drawn]

    def test_a_node_takes_at_most_400_bytes(self) -> None:
        orderer = strict(capacity_tokens=100_000, moves="prefix", suffix_tokens=16)
        for retrieved in self.requests(200, 50_000, seed=1):
            orderer.order(retrieved).confirm()
        scopes_of(orderer).clear()
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for retrieved in self.requests(length(6_000, 2_500), 50_000):
                orderer.order(retrieved).confirm()
            del retrieved
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        size = scopes_of(orderer)[None].tree.size
        assert size > 1_000
        assert (after - before) / size <= 400

    @pytest.mark.parametrize("end", ["confirm", "discard", "forget"])
    def test_does_not_grow(self, end: str) -> None:
        orderer = strict(capacity_tokens=20_000, prefix_tokens=64)
        sizes: list[dict[str, int]] = []
        count = length(20_000, 4_000)
        for number, retrieved in enumerate(self.requests(count, 40_000), 1):
            ordering = orderer.order(retrieved)
            if end != "forget":
                getattr(ordering, end)()
            if number % (count // 4) == 0:
                scope = scopes_of(orderer)[None]
                sizes.append(
                    {
                        "nodes": scope.tree.size,
                        "log": len(scope.mirror.pool.log),
                        "in flight": len(scope.mirror.pool.in_flight),
                        "remembered": len(scope.tail.fallback.uses.cohorts.masks),
                    }
                )
        blocks = 20_000 // BLOCK
        for size in sizes:
            assert size["nodes"] <= 2 * blocks
            assert size["log"] <= 2 * blocks + 2 * 1_024
            assert size["in flight"] <= 1_024
            assert size["remembered"] <= 16_384

    def test_holds_on_to_no_documents(self) -> None:
        class Heavy:
            alive = 0

            def __init__(self, id: str) -> None:
                self.id = id
                Heavy.alive += 1

            def __del__(self) -> None:
                Heavy.alive -= 1

        orderer = strict(key=lambda document: document.id, tokens=lambda document: 32)
        for number in range(50):
            orderer.order([Heavy(f"{number} {place}") for place in range(5)])
        gc.collect()
        assert Heavy.alive == 0
