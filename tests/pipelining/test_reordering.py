"""Cache-aware reordering: the next request, bounded waiting, and no lost requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import serve_live
from support.rings import examples
from support.waiting import turns, until

from ragorder import Document, Lengths, Orderer
from ragorder.adapters.observing.observed import ObservedOrderer
from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.benchmarks.ragcache.reordering import DISCIPLINES, SimulatedQueues
from ragorder.cli import main
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.trace import trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.running.load import ServiceTimes
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter, QueueFullError, Ticket


def priority(value: float) -> Callable[[], CachedLengths]:
    return lambda: CachedLengths(value, 1)


def queue_of(priorities: Iterable[int], window: int = 32) -> CacheAwareQueue[int]:
    queue: CacheAwareQueue[int] = CacheAwareQueue(window)
    for value in priorities:
        queue.enter(value, priority(value))
    return queue


def drain(queue: CacheAwareQueue[Any]) -> list[Any]:
    return [queue.take().item for _ in range(len(queue))]


class TestWhoIsNext:
    def test_the_largest_cached_length_in_relation_to_the_computation_length(self) -> None:
        queue: CacheAwareQueue[str] = CacheAwareQueue()
        lengths = {"none of 10": (0, 10), "half of 400": (200, 200), "most of 100": (90, 10), "other": (90, 10)}
        for name, cached_and_computed in {**lengths, "all": (50, 0)}.items():
            queue.enter(name, partial(CachedLengths, *cached_and_computed))
        assert drain(queue) == ["all", "most of 100", "other", "half of 400", "none of 10"]

    def test_what_is_next_can_be_looked_at_and_taken_later(self) -> None:
        queue = queue_of((1, 3, 2), window=2)
        ticket = queue.peek()
        assert ticket is queue.peek() and ticket.item == 3 and len(queue) == 3 and queue.largest_overtaking == 0
        assert queue.take(ticket) is ticket and list(queue) == [1, 2] and queue.largest_overtaking == 1
        assert drain(queue) == [2, 1]

    @given(st.permutations(range(8)), st.integers(0, 8))
    def test_what_is_put_back_waits_in_its_old_place(self, back: list[int], count: int) -> None:
        queue = queue_of(range(8), window=0)
        tickets = [queue.take() for _ in range(8)]
        queue.enter(8)
        for number in back[:count]:
            queue.put_back(tickets[number])
        expected = [*sorted(back[:count]), 8]
        assert list(queue) == expected and drain(queue) == expected

    def test_lengths_are_read_when_a_request_is_taken(self) -> None:
        queue: CacheAwareQueue[str] = CacheAwareQueue()
        cached = {"a": 1.0, "b": 2.0, "c": 3.0}
        for name in cached:
            queue.enter(name, lambda name=name: CachedLengths(cached[name], 1))  # type: ignore[misc]
        cached["a"] = 9
        assert queue.take().item == "a"
        cached["b"] = 9
        assert queue.take().item == "b"

    def test_items_with_missing_or_failing_lengths_count_as_not_cached(self, caplog: pytest.LogCaptureFixture) -> None:
        queue: CacheAwareQueue[str] = CacheAwareQueue()
        queue.enter("plain")
        for name in ("broken", "broken, too"):
            queue.enter(name, lambda: CachedLengths(1, 1 // 0))
        queue.enter("cached", priority(1))
        assert drain(queue) == ["cached", "plain", "broken", "broken, too"]
        assert [record.getMessage() for record in caplog.records] == [
            "a request counts as not cached: ZeroDivisionError; later ones are not logged"
        ]

    def test_choosing_costs_no_more_however_many_wait(self) -> None:
        queue: CacheAwareQueue[int] = CacheAwareQueue(window=5)
        asked = []
        for number in range(500):
            queue.enter(number, lambda number=number: asked.append(number) or CachedLengths(0, 1))  # type: ignore
        queue.take()
        assert asked == [0, 1, 2, 3, 4, 5]

    def test_those_that_will_probably_be_next_are_the_best_of_the_candidates(self) -> None:
        queue = queue_of(range(8), window=4)
        assert queue.take().item == 4
        assert queue.upcoming(2) == [3, 2]
        assert queue.upcoming(99) == [3, 2, 1, 0, 5], "the last has not been asked yet"

    def test_taking_from_an_empty_queue_is_an_index_error(self) -> None:
        queue: CacheAwareQueue[int] = CacheAwareQueue()
        queue.leave(queue.enter(1))
        assert not queue and queue.upcoming(3) == []
        for ask in (queue.take, queue.peek):
            with pytest.raises(IndexError, match="empty"):
                ask()


STEPS = st.lists(st.one_of(st.floats(0, 10), st.just("take"), st.tuples(st.just("leave"), st.integers(0, 20))))


class TestTheWindow:
    @given(window=st.integers(0, 6), steps=STEPS)
    def test_no_request_is_overtaken_by_more_later_ones_than_the_window(self, window: int, steps: list[Any]) -> None:
        queue: CacheAwareQueue[float] = CacheAwareQueue(window)
        waiting: list[Ticket[float]] = []
        overtaken: dict[Ticket[float], int] = {}
        most = 0

        def take() -> None:
            nonlocal most
            candidates = waiting[: window + 1]
            expected = max(candidates, key=lambda ticket: ticket.item)
            if overtaken[waiting[0]] == window:
                expected = waiting[0]
            taken = queue.take()
            assert taken is expected
            for earlier in waiting[: waiting.index(taken)]:
                overtaken[earlier] += 1
                most = max(most, overtaken[earlier])
            waiting.remove(taken)

        for step in steps:
            if isinstance(step, float):
                waiting.append(queue.enter(step, priority(step)))
                overtaken[waiting[-1]] = 0
            elif step == "take" and waiting:
                take()
            elif step != "take" and waiting:
                left = waiting.pop(step[1] % len(waiting))
                queue.leave(left)
                queue.leave(left)
            assert len(queue) == len(waiting)
        while waiting:
            take()
        assert not queue
        assert all(count <= window for count in overtaken.values())
        assert queue.largest_overtaking == most


class Stage:
    """A gate, and requests that hold their place until they are told to end."""

    def __init__(self, limit: int, window: int = 32, max_waiting: int | None = None) -> None:
        self.gate: ConcurrencyLimiter[str] = ConcurrencyLimiter(limit, CacheAwareQueue(window), max_waiting=max_waiting)
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def send(
        self, *names: str, lengths: Callable[[], CachedLengths] | None = None, patient: bool = False
    ) -> None:
        async def hold(name: str) -> None:
            async with self.gate.slot(name, lengths, patient=patient):
                self.begun.append(name)
                assert self.gate.in_flight <= self.gate.limit
                await self.ends[name].wait()

        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(hold(name), name=name)
            await turns(10)

    async def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()
        await turns(10)

    def assert_idle(self) -> None:
        assert (self.gate.in_flight, len(self.gate.queue), self.gate.has_room) == (0, 0, True)


class TestTheGate:
    async def test_so_many_at_a_time_and_the_best_of_the_others_next(self) -> None:
        stage = Stage(2)
        for number, name in enumerate("abcde"):
            await stage.send(name, lengths=priority(number))
        assert stage.begun == ["a", "b"]
        await stage.end("a")
        assert stage.begun == ["a", "b", "e"]
        await stage.end("b", "e")
        assert stage.begun == ["a", "b", "e", "d", "c"]
        await stage.end("c", "d")
        stage.assert_idle()

    @pytest.mark.parametrize("when", ["while waiting", "when let through", "and is not awake yet"])
    async def test_who_gives_up_passes_the_place_on(self, when: str) -> None:
        stage = Stage(1)
        await stage.send(*"abc")
        if when != "while waiting":
            stage.ends["a"].set()
        if when == "when let through":
            # "a" wakes up and lets "b" through, which is not awake yet.
            await until(lambda: stage.gate.queue.upcoming(1) != ["b"])
        stage.tasks["b"].cancel()
        await turns(10)
        assert list(stage.gate.queue) == (["c"] if when == "while waiting" else [])
        await stage.end("a")
        assert stage.begun == ["a", "c"]
        await stage.end("c")
        stage.assert_idle()

    async def test_a_request_that_fails_gives_its_place_back(self) -> None:
        stage = Stage(1)
        with pytest.raises(ZeroDivisionError):
            async with stage.gate.slot("a"):
                raise ZeroDivisionError
        stage.assert_idle()

    async def test_a_choice_sees_what_the_one_before_has_done(self) -> None:
        """Two places become free at once: the first that is let through is at work when the second is chosen."""
        stage = Stage(2)
        await stage.send("a", "b")
        await stage.send("first", lengths=priority(5))
        await stage.send("other", lengths=priority(1))
        await stage.send("follower", lengths=lambda: CachedLengths(4.0 if "first" in stage.begun else 0.0, 1))
        await stage.end("a", "b")
        assert stage.begun == ["a", "b", "first", "follower"]
        await stage.end("first", "follower", "other")
        stage.assert_idle()

    @pytest.mark.parametrize("max_waiting", [0, 1, 2])
    async def test_patient_requests_wait_in_order_for_a_place_in_a_full_queue(self, max_waiting: int) -> None:
        stage = Stage(1, window=0, max_waiting=max_waiting)
        for name in "abcdef":
            await stage.send(name, patient=True)
            assert len(stage.gate.queue) <= max_waiting
        stage.tasks["d"].cancel()
        await turns(10)
        with pytest.raises(QueueFullError, match=f"{max_waiting} requests are already waiting"):
            async with stage.gate.slot("impatient"):
                pass
        for name in "abce":
            assert stage.begun[-1] == name
            await stage.end(name)
        await stage.end("f")
        assert "".join(stage.begun) == "abcef"
        stage.assert_idle()

    @pytest.mark.parametrize(("limit", "max_waiting", "window"), [(0, None, 0), (1, -1, 0), (1, None, -1)])
    def test_numbers_that_cannot_be_are_refused(self, limit: int, max_waiting: int | None, window: int) -> None:
        with pytest.raises(ValueError, match="must"):
            ConcurrencyLimiter(limit, CacheAwareQueue(window), max_waiting=max_waiting)

    @settings(max_examples=examples(40))
    @given(limit=st.integers(1, 3), seed=st.integers(0, 1 << 20), max_waiting=st.none() | st.integers(0, 3))
    async def test_no_slot_and_no_request_is_lost(self, limit: int, seed: int, max_waiting: int | None) -> None:
        rng = random.Random(seed)
        stage = Stage(limit, window=2, max_waiting=max_waiting)
        gone = set()
        for number in range(20):
            await stage.send(str(number), lengths=priority(rng.random()), patient=True)
            assert max_waiting is None or len(stage.gate.queue) <= max_waiting
            name = rng.choice(list(stage.tasks))
            if rng.random() < 0.5:
                stage.ends[name].set()
            if rng.random() < 0.3:
                stage.tasks[name].cancel()
                gone.add(name)
            await turns(rng.randrange(3))
        for event in stage.ends.values():
            event.set()
        await asyncio.gather(*stage.tasks.values(), return_exceptions=True)
        assert set(stage.begun) | gone == set(stage.tasks)
        assert len(stage.begun) == len(set(stage.begun))
        assert stage.gate.queue.largest_overtaking <= 2
        stage.assert_idle()


NAMES = st.lists(st.sampled_from("abcdefg"), max_size=5)


def documents(names: Sequence[str]) -> list[Document]:
    return [Document(name, name, tokens=10 + 7 * (ord(name) - ord("a"))) for name in names]


class TestPredicting:
    @settings(max_examples=examples(50))
    @given(
        requests=st.lists(NAMES, max_size=12),
        options=st.sampled_from([{}, {"search": "greedy"}, {"max_displacement": 0}, {"keep_first": 1}]),
    )
    def test_is_what_an_ordering_predicts_and_nothing_is_recorded(
        self, requests: list[list[str]], options: dict[str, Any]
    ) -> None:
        shape: dict[str, Any] = {"block_size": 16, "capacity_tokens": 256, "prefix_tokens": 20, "strict": True}
        asked, other = Orderer(**shape, **options), Orderer(**shape, **options)
        for names in requests:
            predicted = asked.predict_cached_tokens(documents(names))
            for others in requests:
                asked.predict_cached_tokens(documents(others))
            ordering = asked.order(documents(names))
            if "search" not in options:
                assert predicted == (ordering.cached_tokens, ordering.documents_end)
            assert predicted[1] == ordering.documents_end
            expected = other.order(documents(names))
            assert (ordering.permutation, ordering.cached_tokens) == (expected.permutation, expected.cached_tokens)
            ordering.confirm()
            expected.confirm()

    def test_an_unknown_scope_is_not_created(self) -> None:
        orderer = Orderer(block_size=16, prefix_tokens=64, strict=True)
        assert orderer.predict_cached_tokens(documents("a"), scope="t", lengths=Lengths(prefix=100)) == (0, 110)
        assert orderer.predict_cached_tokens(documents("a"), scope="t") == (0, 74)
        orderer.order(documents("a"), scope="t", lengths=Lengths(prefix=100))
        assert orderer.predict_cached_tokens(documents("a"), scope="t") == (96, 110)

    def test_a_watched_orderer_predicts_the_order_that_is_served(self) -> None:
        for shadow, cached in ((False, 32), (True, 0)):
            orderer = ObservedOrderer(Orderer(block_size=16, prefix_tokens=0, strict=True), shadow=shadow)
            orderer.order([Document("a", "a", tokens=32), Document("b", "b", tokens=64)]).confirm()
            asked = [Document("c", "c", tokens=8), Document("a", "a", tokens=32)]
            assert orderer.predict_cached_tokens(asked) == (cached, 40)


class TestTheMeasurement:
    @pytest.fixture(scope="class")
    def outcomes(self) -> dict[str, Any]:
        """Twice as many requests as can be served, in each discipline."""
        trace = trace_of_workload(make_workload("geo", 0, requests=80), 80)
        at_s = [arrival.at_s for arrival in poisson_arrivals(40.0, 80, 0)]
        queues = SimulatedQueues(16_000, max_in_flight=4)
        return {name: queues.serve(trace, at_s, each) for name, each in DISCIPLINES.items()}

    def test_reordering_reuses_more_and_stays_in_its_window(self, outcomes: dict[str, Any]) -> None:
        for outcome in outcomes.values():
            assert len(outcome.ttft_s) == 80 and outcome.total_s > max(outcome.ttft_s) > min(outcome.ttft_s) > 0
        plain, _, reordered, laid_out = outcomes.values()
        assert plain.largest_overtaking == 0 < reordered.largest_overtaking <= 32
        assert sum(plain.cached_tokens) < sum(reordered.cached_tokens) < sum(laid_out.cached_tokens)
        assert sum(plain.ttft_s) > sum(reordered.ttft_s) > sum(laid_out.ttft_s)

    def test_the_time_in_the_queue_counts(self) -> None:
        """One request at a time: the others wait since they arrived, not since they were sent."""
        trace = trace_of_workload(make_workload("unique", 0, requests=3), 3)
        times = ServiceTimes(prefill_tokens_per_s=1_000.0, decode_tokens_per_s=4.0)
        outcome = SimulatedQueues(None, 1, times=times).serve(trace, [0.0, 0.1, 0.3], DISCIPLINES["fcfs"])
        counts = zip(outcome.prompt_tokens, outcome.cached_tokens, strict=True)
        prefills = [(tokens - cached) / 1_000 for tokens, cached in counts]
        first_tokens = [sum(prefills[: number + 1]) + number / 4 for number in range(3)]
        assert outcome.ttft_s == pytest.approx([first_tokens[0], first_tokens[1] - 0.1, first_tokens[2] - 0.3])

    def test_on_a_server_the_time_in_the_queue_counts_too(self) -> None:
        """The far end, on a virtual clock: a first token after half a second, and the slot free after two."""

        class Slow:
            name, kept_output_tokens, partial_blocks_first = "slow", 0, False
            block_size, capacity_tokens = 16, None

            async def __aenter__(self) -> Slow:
                return self

            async def __aexit__(self, *error: object) -> None:
                pass

            async def check(self, token_ids: Sequence[int]) -> None:
                pass

            async def complete(self, token_ids: Sequence[int]) -> EngineCompletion:
                await asyncio.sleep(2.0)
                return EngineCompletion(0.5, 0, len(token_ids))

        trace = trace_of_workload(make_workload("unique", 0, requests=3), 3)
        queued = trace, [0.0, 0.5, 5.0], DISCIPLINES["fcfs"]
        outcome = run_virtual(serve_live(Slow, NumberedPrompts(), 1, *queued))
        # The second waits from 0.5 to 2; the third finds the slot free.
        assert outcome.ttft_s == pytest.approx([0.5, 1.5 + 0.5, 0.5])
        assert outcome.total_s == pytest.approx(7.0)

    def test_a_running_server_has_one_cache_size(self, tmp_path: Path) -> None:
        run = [
            "eval",
            "run",
            "reordering",
            "-o",
            str(tmp_path),
            "--engine",
            "openai",
            "--base-url",
            "http://localhost:1",
        ]
        assert "0 runs served" in CliRunner().invoke(main, run).output
        assert "a running server has one cache size" in (tmp_path / "results.jsonl").read_text()
