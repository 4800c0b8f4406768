"""Moves are earned: documents move on a forecast only in a scope where that has paid."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count, islice
from typing import Any, NamedTuple

import pytest
from support.rings import grid, length

from ragorder import Document, Orderer
from ragorder.eval.data.workloads import make_workload

Stream = Sequence[list[Document]]
PREFIX_TOKENS = 64


@cache
def skewed(requests: int = 600, seed: int = 0) -> Stream:
    """Documents that are popular to different degrees, ten for each request: an order by popularity is shared."""
    workload = make_workload("zipf10", seed, requests=requests)
    return [[workload.documents[number] for number in ranking] for ranking in workload.rankings]


@cache
def recurring(requests: int = 1000, seed: int = 0) -> Stream:
    """300 lists of documents that are asked for again and again, some more often, in the same rank order."""
    rng = random.Random(seed)
    documents = [Document(f"d{number}", tokens=rng.randint(60, 200)) for number in range(900)]
    lists = [rng.sample(documents, 5) for _ in range(300)]
    return rng.choices(lists, [1 / (place + 1) for place in range(300)], k=requests)


class Served(NamedTuple):
    cached_tokens: int
    moved: list[bool]
    permutations: list[list[int]]
    cached_percent: float


SERVED: dict[tuple[Any, ...], tuple[Stream, Served]] = {}


def serve(stream: Stream, **options: Any) -> Served:
    """What a new orderer serves, once for all tests."""
    key = id(stream), *sorted(options.items())
    if key not in SERVED:
        SERVED[key] = stream, serve_by(make(**options), stream)
    return SERVED[key][1]


def serve_by(orderer: Orderer, stream: Stream, scope: str | None = None) -> Served:
    cached_tokens, permutations = 0, []
    for request in stream:
        ordering = orderer.order(request, scope=scope)
        cached_tokens += ordering.cached_tokens
        permutations.append(list(ordering.permutation))
        ordering.confirm()
    moved = [order != sorted(order) for order in permutations]
    tokens = sum(PREFIX_TOKENS + sum(document.token_count for document in request) for request in stream)
    return Served(cached_tokens, moved, permutations, 100 * cached_tokens / tokens)


def make(**options: Any) -> Orderer:
    return Orderer(**{"capacity_tokens": 100_000, "prefix_tokens": PREFIX_TOKENS, "strict": True} | options)


class TestWhereMovesPay:
    @pytest.mark.parametrize("seed", grid([0, 1, 2], 1))
    def test_nearly_all_of_the_hits_are_there_by_default(self, seed: int) -> None:
        stream = skewed(seed=seed)
        free, earned, prefix = (serve(stream, moves=moves).cached_percent for moves in ("free", "earned", "prefix"))
        assert serve(stream).permutations == serve(stream, moves="earned").permutations
        assert free > prefix + 2
        assert earned > free - 0.5

    def test_within_200_requests_they_begin(self) -> None:
        stream = skewed(requests=400)
        earned, prefix = (serve(stream, moves=moves).permutations for moves in ("earned", "prefix"))
        assert earned[:5] == prefix[:5]
        assert any(ours != ranked for ours, ranked in zip(earned[:200], prefix[:200], strict=True))
        free = serve(stream[200:], moves="free").cached_percent
        assert serve(stream, moves="earned").cached_percent > free - 3


class TestWhereTheyDoNot:
    @pytest.mark.parametrize("capacity_tokens", grid([12_000, 100_000, None], 2))
    def test_recurring_questions_are_left_alone(self, capacity_tokens: int | None) -> None:
        stream = recurring()
        free, earned, prefix = (
            serve(stream, moves=moves, capacity_tokens=capacity_tokens) for moves in ("free", "earned", "prefix")
        )
        assert sum(free.moved) > 300
        assert sum(earned.moved) <= 1.5 * sum(prefix.moved)
        assert earned.cached_percent > free.cached_percent - 1

    def test_nothing_but_the_cached_prefix_moves(self) -> None:
        assert serve(recurring()).permutations == serve(recurring(), moves="prefix").permutations

    def test_a_guard_that_leaves_nothing_to_gain_ends_them(self) -> None:
        stream = recurring()
        guarded = serve(stream, keep_first=1)
        assert sum(serve(stream, moves="free", keep_first=1).moved) > 300
        assert sum(guarded.moved) <= 1.5 * sum(serve(stream, moves="prefix", keep_first=1).moved)

    def test_what_does_not_recur_moves_nothing(self) -> None:
        documents = [[Document(f"{number} {rank}", tokens=100) for rank in range(5)] for number in range(300)]
        assert not any(serve(documents).moved)


class TestBestPlace:
    """Moves are earned, and counted, against the order that the best document's place asks for."""

    def test_moves_that_pay_leave_the_best_document_where_it_is(self) -> None:
        stream = skewed()
        earned, prefix = (serve(stream, moves=moves, best="last", best_tokens=1_000) for moves in ("earned", "prefix"))
        assert earned.cached_percent > prefix.cached_percent + 1
        assert earned.permutations != prefix.permutations
        assert all(order[-1] == 0 for order in earned.permutations)

    @pytest.mark.parametrize(("best", "order"), [("last", [1, 2, 3, 4, 0]), ("first", [0, 1, 2, 3, 4])])
    def test_recurring_questions_earn_none_and_lose_no_hits(self, best: str, order: list[int]) -> None:
        stays = {
            moves: serve(recurring(), moves=moves, best=best).permutations.count(order)
            for moves in ("earned", "prefix", "free")
        }
        assert stays["earned"] > 0.95 * stays["prefix"] > 1.5 * stays["free"]
        assert serve(recurring(), best=best).cached_percent > serve(recurring()).cached_percent - 1

    def test_it_costs_few_hits(self) -> None:
        stream = skewed()
        placed, free = serve(stream, best="last"), serve(stream)
        assert placed.cached_percent > 0.8 * free.cached_percent
        assert sum(order[-1] == 0 for order in placed.permutations) > 0.8 * len(stream)


class TestWaiting:
    """Where the future is known, nothing has to be earned."""

    def ahead(self, moves: str, stream: Stream) -> int:
        orderer, found = make(moves=moves, capacity_tokens=20_000), 0
        for number, request in enumerate(stream):
            ordering = orderer.order(request, waiting=stream[number + 1 : number + 9])
            found += ordering.cached_tokens
            ordering.confirm()
        return found

    def test_their_gains_are_those_of_free_moves(self) -> None:
        stream = skewed(requests=length(300, 150))
        assert self.ahead("earned", stream) > 0.97 * self.ahead("free", stream)

    def test_so_are_those_of_a_batch(self) -> None:
        stream = skewed(requests=length(120, 80))

        def found(moves: str) -> int:
            cached_tokens = 0
            for ordering in make(moves=moves, capacity_tokens=20_000).order_batch(stream):
                cached_tokens += ordering.cached_tokens
                ordering.confirm()
            return cached_tokens

        assert found("earned") > 0.97 * found("free") > 0


class TestAScope:
    def test_earns_for_itself_alone(self) -> None:
        """The engine has room for both."""
        orderer = make(capacity_tokens=None)
        serve_by(orderer, skewed(), "skewed")
        assert serve_by(orderer, recurring(300), "recurring") == serve(recurring(300), capacity_tokens=None)

    def test_previews_what_it_would_order(self) -> None:
        orderer = make()
        for request in skewed(requests=300):
            shown = orderer.preview(request)
            ordering = orderer.order(request)
            assert shown == ordering.documents
            ordering.confirm()

    def test_learns_from_requests_that_others_had_served(self) -> None:
        ours, told = make(), make()
        for request in skewed(requests=400):
            ordering = ours.order(request)
            ordering.confirm()
            told.record(request, permutation=ordering.permutation)
        for request in skewed(requests=50, seed=1):
            assert told.preview(request) == ours.preview(request)


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


@pytest.mark.parametrize(("capacity_tokens", "requests"), [(20_000, 3_000), (None, 4_500)])
def test_memory_is_bounded(
    capacity_tokens: int | None, requests: int, traced: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any capacity at most 4,096 requests are kept."""
    monkeypatch.setattr("ragorder.scope.scopes.MAX_NODES", 10_000)
    orderer, numbers = make(capacity_tokens=capacity_tokens), count()

    def order() -> int:
        for number in islice(numbers, requests):
            orderer.order([Document(f"{number} {rank}", tokens=50) for rank in range(3)]).confirm()
        return traced()

    assert order() > 0.9 * order()
