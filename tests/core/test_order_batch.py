"""Orders of one request and of a batch find as much as the engine holds, and no less than retrieval order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import scopes_of
from support.orders import (
    MOVES,
    OPTIONS,
    SEARCHES,
    STREAMS,
    check_idle,
    check_permutation,
    documents,
    ids,
    serve,
    strict,
)
from support.rings import examples, grid

from ragorder import Document, Orderer
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import settings_of
from ragorder.eval.engines.sim import SimEngine

BLOCK = 16


class Prompts:
    """Token ids of prompts: system prompt, documents, a question of its own."""

    def __init__(self, prefix_tokens: int) -> None:
        self.prefix_tokens = prefix_tokens
        self._first: dict[str, int] = {}
        self._questions = 0

    def documents(self, retrieved: Sequence[Document]) -> array[int]:
        prompt = array("q", range(-self.prefix_tokens, 0))
        for document in retrieved:
            first = self._first.setdefault(document.key, len(self._first) * 1_000_000)
            prompt.extend(range(first, first + document.token_count))
        return prompt

    def __call__(self, retrieved: Sequence[Document]) -> array[int]:
        self._questions += 1
        first = -10_000_000_000 - self._questions * 100
        return self.documents(retrieved) + array("q", range(first, first + 20))


def mirroring(engine: SimEngine, prefix_tokens: int, **options: Any) -> Orderer:
    options |= {"prefix_tokens": prefix_tokens, "suffix_tokens": 20 + engine.kept_output_tokens}
    return Orderer(settings_of(engine, strict=True, **options))


class TestNeverWorseThanRetrievalOrder:
    """Whatever the engine holds when a request comes: in our order at least as much of it is reused, to the token."""

    @staticmethod
    def check(orderer: Orderer, engine: SimEngine, prompts: Prompts, stream: Sequence[list[Document]]) -> int:
        won = 0
        for number, retrieved in enumerate(stream):
            ordering = orderer.order(retrieved, waiting=stream[number + 1 : number + 3])
            ours = engine.cached_tokens(prompts.documents(ordering.documents))
            retrieval = engine.cached_tokens(prompts.documents(retrieved))
            assert ours >= retrieval
            assert ours == ordering.cached_tokens
            won += ours > retrieval
            ordering.confirm(engine.generate(prompts(ordering.documents)).cached_tokens)
        return won

    @settings(max_examples=examples(150), deadline=None)
    @given(
        STREAMS,
        st.lists(st.integers(1, 60), min_size=8, max_size=8),
        st.none() | st.integers(1, 60),
        st.integers(0, 40),
        st.sampled_from(SEARCHES),
        st.sampled_from(MOVES),
    )
    def test_on_random_streams(
        self,
        stream: list[list[str]],
        lengths: list[int],
        blocks: int | None,
        prefix_tokens: int,
        search: str,
        moves: str,
    ) -> None:
        corpus = {id: Document(id, tokens=length) for id, length in zip("abcdefgh", lengths, strict=True)}
        engine = SimEngine(capacity_tokens=None if blocks is None else blocks * BLOCK)
        orderer = mirroring(engine, prefix_tokens, search=search, moves=moves)
        self.check(orderer, engine, Prompts(prefix_tokens), [[corpus[id] for id in request] for request in stream])

    @pytest.mark.parametrize(
        ("search", "name", "capacity_tokens"),
        grid(list(product(SEARCHES, ["paper", "paper-shuf", "zipf10"], [5_000, 30_000, None])), 4),
    )
    def test_on_workloads(self, search: str, name: str, capacity_tokens: int | None) -> None:
        workload = make_workload(name, 0, requests=150)
        stream = [[workload.documents[number] for number in ranking] for ranking in workload.rankings]
        engine = SimEngine(capacity_tokens=capacity_tokens)
        orderer = mirroring(engine, 64, search=search)
        assert self.check(orderer, engine, Prompts(64), stream) > 10


class TestBatch:
    @settings(deadline=None)
    @given(OPTIONS, STREAMS, STREAMS, st.none() | st.integers(0, 10))
    def test_every_request_once_each_a_permutation_within_its_wait(
        self, options: dict[str, Any], earlier: list[list[str]], stream: list[list[str]], max_wait: int | None
    ) -> None:
        orderer = strict(**options)
        serve(orderer, *earlier)
        retrieved = [documents(request) for request in stream]
        copy = [list(request) for request in retrieved]
        batch = orderer.order_batch(retrieved, max_wait=max_wait)
        orderings = list(batch)
        assert retrieved == copy
        assert sorted(ordering.index for ordering in orderings) == list(range(len(retrieved)))
        assert [ordering.index for ordering in orderings] == list(batch.indices)
        for place, ordering in enumerate(orderings):
            check_permutation(ordering, retrieved[ordering.index])
            if max_wait is not None:
                assert place - ordering.index <= max_wait
            if options["keep_first"] and len(ordering.permutation) >= options["keep_first"]:
                assert list(ordering.permutation[: options["keep_first"]]) == list(range(options["keep_first"]))
            ordering.confirm()
        if earlier or stream:
            check_idle(orderer)

    @given(STREAMS, st.integers(0, 3))
    def test_guards_hold_in_a_batch(self, stream: list[list[str]], limit: int) -> None:
        for ordering in strict(max_displacement=limit).order_batch(map(documents, stream)):
            assert all(abs(place - rank) <= limit for place, rank in enumerate(ordering.permutation))
        for ordering in strict(keep_last=1).order_batch(map(documents, stream)):
            assert ordering.permutation[-1:] in ([0], [])
        for ordering in strict(keep_groups=True, group=lambda document: "all").order_batch(map(documents, stream)):
            assert list(ordering.permutation) == sorted(ordering.permutation)

    @settings(deadline=None)
    @given(OPTIONS, STREAMS, STREAMS, st.none() | st.integers(0, 12))
    def test_never_finds_less_than_one_by_one(
        self, options: dict[str, Any], earlier: list[list[str]], stream: list[list[str]], max_wait: int | None
    ) -> None:
        found = []
        for batched in (False, True):
            orderer = strict(**options)
            serve(orderer, *earlier)
            requests = [documents(request) for request in stream]
            orderings = orderer.order_batch(requests, max_wait=max_wait) if batched else map(orderer.order, requests)
            total = 0
            for ordering in orderings:
                total += ordering.cached_tokens
                ordering.confirm()
            found.append(total)
        assert found[1] >= found[0]

    @settings(deadline=None)
    @given(OPTIONS, STREAMS, STREAMS)
    def test_no_wait_is_one_by_one(
        self, options: dict[str, Any], earlier: list[list[str]], stream: list[list[str]]
    ) -> None:
        one, other = strict(**options), strict(**options)
        for orderer in (one, other):
            serve(orderer, *earlier)
        requests = [documents(request) for request in stream]
        batch = one.order_batch(requests, max_wait=0)
        for number, request in enumerate(requests):
            taken, ordered = batch[number], other.order(request)
            assert taken.index == number
            assert (taken.permutation, taken.cached_tokens) == (ordered.permutation, ordered.cached_tokens)
            taken.confirm()
            ordered.confirm()

    def test_a_window_is_planned_on_the_cache_left_by_the_one_before(self) -> None:
        """Each set comes twice, in different windows."""
        requests = ["abcd", "efgh", "dcba", "hgfe", "badc", "ghef"]
        for max_wait in (None, *range(6)):
            orderings = list(strict(capacity_tokens=None).order_batch(map(documents, requests), max_wait=max_wait))
            assert sum(ordering.prefix_documents for ordering in orderings) == 4 * 4, max_wait

    @pytest.mark.parametrize(
        ("name", "max_wait"), grid(list(product(["paper-shuf", "mix8", "zipf10"], [None, 100, 50, 20, 5, 1])), 9)
    )
    def test_a_wait_saves_on_workloads(self, name: str, max_wait: int | None) -> None:
        """On the engine itself, and by more than the property requires: waiting gains something."""
        workload = make_workload(name, 0, requests=200)
        stream = [[workload.documents[number] for number in ranking] for ranking in workload.rankings[:200]]
        totals = []
        for batched in (True, False):
            engine, prompts = SimEngine(capacity_tokens=16_384), Prompts(64)
            orderer = mirroring(engine, 64)
            orderings = iter(orderer.order_batch(stream, max_wait=max_wait)) if batched else map(orderer.order, stream)
            totals.append(0)
            for ordering in orderings:
                cached_tokens = engine.generate(prompts(ordering.documents)).cached_tokens
                totals[-1] += cached_tokens
                ordering.confirm(cached_tokens)
        assert totals[0] > (1.1 if max_wait in (None, 100, 50, 20) else 1) * totals[1]

    def test_planning_leaves_the_orderer_as_it_is(self) -> None:
        planned, other = strict(capacity_tokens=400), strict(capacity_tokens=400)
        for orderer in (planned, other):
            serve(orderer, "abcd", "bcde", "abce")
        flying = planned.order(documents("acx")), other.order(documents("acx"))
        planned.order_batch(map(documents, ["dcb", "xyz", "abe", "zyx"]), max_wait=2)
        planned.order_batch(map(documents, ["dcb", "xyz", "abe", "zyx"]))
        for ordering in flying:
            ordering.confirm()
        for request in ("bcd", "axyz", "abcde"):
            one, two = planned.order(documents(request)), other.order(documents(request))
            assert (one.permutation, one.cached_tokens) == (two.permutation, two.cached_tokens)
            one.confirm()
            two.confirm()
        check_idle(planned)

    def test_an_empty_batch_and_a_negative_wait(self) -> None:
        batch = strict().order_batch([])
        assert (len(batch), list(batch), list(batch.indices)) == (0, [], [])
        with pytest.raises(IndexError):
            batch[0]
        with pytest.raises(ValueError, match="max_wait"):
            Orderer().order_batch([documents("ab")], max_wait=-1)

    def test_a_request_is_in_flight_only_once_it_is_taken(self) -> None:
        orderer = strict()
        batch = orderer.order_batch([documents("abc"), documents("xyz")])
        assert (len(batch), sorted(batch.indices), orderer.tree_size) == (2, [0, 1], 0)
        first = batch[0]
        assert orderer.tree_size == 3
        first.discard()
        assert orderer.tree_size == 0
        batch[1].confirm()
        assert orderer.tree_size == 3

    def test_taking_an_ordering_again_gives_the_same_one(self) -> None:
        orderer = strict()
        batch = orderer.order_batch([documents("abc"), documents("cbx"), documents("xyz")])
        once = list(batch)
        assert all(one is other for one, other in zip(once, batch, strict=True))
        assert batch[-1] is once[2] and batch[1] is once[1]
        assert batch[:2] == once[:2] and batch[::-1] == once[::-1] and batch[5:] == []
        assert once[0] in batch
        assert len(scopes_of(orderer).pool.in_flight) == 3
        for place in (3, -4):
            with pytest.raises(IndexError):
                batch[place]

    def test_what_is_already_cached_comes_first_and_is_extended(self) -> None:
        orderer = strict()
        serve(orderer, "klm", "abc")
        batch = orderer.order_batch(map(documents, ["xyz", "mlkx", "wxy", "cbaz"]))
        assert list(batch.indices)[:2] == [1, 3], "what is evicted first is served first"
        assert [ids(ordering)[:3] for ordering in batch[:2]] == ["klm", "abc"]

    def test_a_request_that_cannot_start_stays_in_retrieval_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        orderer = Orderer()
        batch = orderer.order_batch([documents("abc"), documents("cbx")])
        first = batch[0]
        monkeypatch.setattr(type(scopes_of(orderer)[None].residency), "lease", lambda *_: 1 / 0)
        second = batch[1]
        assert (second.fallback, second.index) == (True, batch.indices[1])
        assert list(second.permutation) == [0, 1, 2]
        monkeypatch.undo()
        first.confirm()
        assert orderer.fallbacks == 1
