"""Batches follow the backlog; what a batch takes is its trie."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from random import Random
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples
from support.workflows import Asked, PlainPrompts, digest

from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.pipelining import AnswerChunk, Usage, plain_retrieval
from ragorder.pipelining.batching import (
    AllWaiting,
    Backlog,
    BacklogAware,
    BatchEvent,
    Context,
    DecoupledServer,
    PowerLaw,
    TrieKV,
    best_batch,
)
from ragorder.pipelining.batching.kv import largest_prefix
from ragorder.pipelining.workflow import NodeQuestion


class TestPolicies:
    @pytest.mark.parametrize("most", [None, 64])
    def test_all_that_wait(self, most: int | None) -> None:
        sizes = [AllWaiting(most).size(Backlog(waiting, 1)) for waiting in (1, 62, 63, 64, 700)]
        assert sizes == [2, 63, 64, *([64, 64] if most else [65, 701])]

    @given(waiting=st.integers(1, 200), running=st.integers(0, 50), c=st.floats(0, 1.5), most=st.integers(1, 40))
    def test_backlog_aware_takes_the_best_batch(self, waiting: int, running: int, c: float, most: int) -> None:
        law = PowerLaw(2.0, c)
        batcher = BacklogAware(law.__call__, most=most)
        sizes = sorted({*(1 << power for power in range(most.bit_length())), most})
        # Twice, the second time from what it remembers, and with arrivals.
        for soon in ((), (), (0.1, 0.3)):
            expected = best_batch(min(waiting + running, 4 * most), law, sizes, soon)
            assert batcher.size(Backlog(waiting, running, soon)) == expected

    def test_times_of_batches_are_learnt(self) -> None:
        batcher = BacklogAware(most=64)
        assert batcher.size(Backlog(64)) == 64
        for size in (1, 4, 16, 64, 2, 8, 32) * 10:
            batcher.learn(size, 0.5 * size)
        assert batcher.size(Backlog(64)) == 1
        before = batcher.size(Backlog(16))
        for size, seconds in ((0, 1.0), (4, 0.0), (4, math.inf), (4, -1.0)):
            batcher.learn(size, seconds)
        assert batcher.size(Backlog(16)) == before

    def test_sizes_to_choose_from(self) -> None:
        batcher = BacklogAware(PowerLaw(1, 0.2), sizes=[8, 16])
        assert [batcher.size(Backlog(waiting)) for waiting in (3, 8, 12, 16, 99)] == [3, 8, 12, 16, 16]

    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            (AllWaiting, {"most": 0}),
            (BacklogAware, {"most": 0}),
            (BacklogAware, {"sizes": []}),
            (BacklogAware, {"sizes": [4, -1]}),
        ],
    )
    def test_sizes_below_one_are_refused(self, kind: Any, options: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            kind(**options)


def trie_kv(**options: Any) -> TrieKV[str, str]:
    return TrieKV(key=str, tokens=lambda document: 10 + len(document), own_tokens=lambda question: 100, **options)


class TestKVTokens:
    def test_shared_documents_count_once_wherever_they_stand(self) -> None:
        contexts = [Context("q1", ["a", "b", "c"]), Context("q2", ["c", "b", "a"]), Context("q3", ["b", "x"])]
        # b is shared by all, a and c by two.
        assert trie_kv()(contexts) == 300 + 11 * 4
        assert trie_kv()(contexts[:1]) == 100 + 33
        assert trie_kv()([]) == 0
        # Twice in a prompt; the same request twice.
        assert trie_kv()([Context("q", ["a", "a", "b"])]) == 100 + 33
        kv = trie_kv()
        assert [kv([contexts[0]] * count) for count in (1, 2, 1)] == [133, 233, 133]

    def test_the_system_prompt_counts_once_in_each_scope(self) -> None:
        kv = trie_kv(prefix_tokens=50, scope=lambda question: question[0])
        assert kv([Context("a1", ["d"]), Context("a2", ["d"])]) == 50 + 200 + 11
        assert kv([Context("a1", ["d"]), Context("b2", ["d"])]) == 100 + 200 + 22

    @settings(max_examples=examples(100))
    @given(st.integers(0, 2**16))
    def test_follow_a_trie_as_requests_come_and_go(self, seed: int) -> None:
        """Never less than the distinct documents need, nor more than the sum; nothing is left of those that have
        ended."""
        random, kv, running = Random(seed), trie_kv(), list[Context[str, str]]()
        for number in range(120):
            if random.random() < 0.4 and running:
                running.pop(random.randrange(len(running)))
            else:
                running.append(Context(f"q{number}", random.sample("abcdefghijkl", random.randint(0, 5))))
            distinct = {each for _, documents in running for each in documents}
            for counted in (kv, trie_kv()) if number % 20 == 0 else (kv,):
                found = counted(running) - 100 * len(running)
                assert 11 * len(distinct) <= found <= 11 * sum(len(documents) for _, documents in running)
        while running:
            running.pop(random.randrange(len(running)))
            assert kv(running) == kv(running)
        assert kv(running) == 0

    def test_requests_that_join_one_by_one_share_about_as_much_as_a_plan_of_all(self) -> None:
        """Documents of topics, some asked for much more than others."""
        random, kv, running, shares = Random(0), trie_kv(), list[Context[str, str]](), list[float]()
        for number in range(400):
            if number >= 48:
                running.pop(random.randrange(len(running)))
            topic = min(random.randrange(12), random.randrange(12))
            ranked = sorted(range(12), key=lambda each: random.random() * (1 + each))
            running.append(Context(f"q{number}", [f"{topic:02}.{each:02}" for each in ranked[:5]]))
            found = kv(running)
            if number >= 100 and number % 10 == 0:
                shares.append((found - 4800) / (trie_kv()(running) - 4800))
        assert len(running) == 48 and len(shares) == 30
        assert fmean(shares) < 1.25

    def test_each_document_and_question_is_read_once(self) -> None:
        read: Counter[str] = Counter()

        def counted(text: str) -> int:
            read[text] += 1
            return 10

        kv: TrieKV[str, str] = TrieKV(key=str, tokens=counted, own_tokens=counted)
        running = [Context(f"q{number}", [f"d{number}", f"e{number}"]) for number in range(40)]
        for count in (*range(1, 41), *range(40, 0, -1)):
            assert kv(running[:count]) == 30 * count
        assert set(read.values()) == {1}

    @given(st.integers(1, 40), st.integers(0, 50))
    def test_the_longest_prefix_that_fits(self, count: int, fitting: int) -> None:
        tried: list[int] = []

        def fits(number: int) -> bool:
            tried.append(number)
            return number <= fitting

        found = largest_prefix(count, fits)
        assert found == max(1, min(count, fitting)) and len(tried) <= 6


class BatchEngine:
    """On the virtual clock: a request takes the time of a batch of all that run when it begins."""

    def __init__(self, law: PowerLaw) -> None:
        self.law = law
        self.running = 0

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        self.running += 1
        try:
            # All of a batch have begun after it.
            await asyncio.sleep(0.001)
            await asyncio.sleep(self.law(self.running))
            text = f"a{digest((request.question.text, request.documents)):x}"
            yield AnswerChunk(text, Usage(request.prompt_tokens, 0, 1, "stop"))
        finally:
            self.running -= 1


async def served(
    arrivals_s: Sequence[float], *, joins: bool, batching: Any, found: Sequence[str] = (), **options: Any
) -> list[BatchEvent]:
    """`found`: the documents of all questions, or else each finds one of its own."""
    loop = asyncio.get_running_loop()

    async def retrieve(question: NodeQuestion) -> Sequence[str]:
        await asyncio.sleep(0.1)
        return found or [question.text]

    server: DecoupledServer[Any, Any, Any] = DecoupledServer(
        plain_retrieval(retrieve),
        PlainPrompts(),
        BatchEngine(PowerLaw(1.0, 0.4)),
        joins=joins,
        batching=batching,
        clock=loop.time,
        **options,
    )

    async def arrive(number: int, at_s: float) -> str:
        await asyncio.sleep(at_s)
        answer = await server.run(NodeQuestion(f"question {number}"))
        assert answer.documents == (found or [f"question {number}"])
        return answer.text

    async with server:
        answers = await asyncio.gather(*(arrive(number, at_s) for number, at_s in enumerate(arrivals_s)))
    assert len(answers) == len(arrivals_s) and all(answers)
    return [event for event in server.trace if event.worker == "generation"]


def bursts(draw: Random, count: int) -> list[float]:
    """Quiet times with a request now and then, and bursts."""
    times, now_s = [], 0.0
    for _ in range(count):
        now_s += draw.uniform(5, 20)
        times += [now_s] * draw.choice((1, 1, 2, 10, 40, 100))
    return times


class WithoutForesight(BacklogAware):
    """By what waits alone."""

    def size(self, backlog: Backlog) -> int:
        return super().size(Backlog(backlog.waiting, backlog.running))


class TestBatchesFollowTheBacklog:
    @settings(max_examples=examples(50), deadline=None)
    @given(seed=st.integers(0, 999))
    def test_a_batch_is_the_backlog_and_falls_with_it(self, seed: int) -> None:
        """Far below Eq. 8's threshold the best batch is all that waits: each has the size of the backlog before it, so
        that it rises with the backlog, and has fallen one batch after it."""
        batcher = WithoutForesight(PowerLaw(1.0, 0.1).__call__, most=64)
        events = run_virtual(served(bursts(Random(seed), 6), joins=False, batching=batcher))
        began = [event for event in events if event.event == "began"]
        ended = [event for event in events if event.event == "ended"]
        assert len(began) == len(ended)
        for event in began:
            backlog = event.running + event.waiting
            assert event.batch == event.running == min(64, backlog)
        for before, after in itertools.pairwise(began):
            if not before.waiting and after.running < before.running:
                assert after.batch < before.batch

    @settings(max_examples=examples(50), deadline=None)
    @given(seed=st.integers(0, 999))
    def test_where_requests_join_as_many_run_as_the_backlog_allows(self, seed: int) -> None:
        batcher = BacklogAware(PowerLaw(1.0, 0.1).__call__, most=32)
        arrivals = bursts(Random(seed), 6)
        events = run_virtual(served(arrivals, joins=True, batching=batcher))
        began = [event for event in events if event.event == "began"]
        assert len(began) == len(arrivals)
        for event in began:
            assert event.running <= event.batch <= 32
            assert event.batch == min(32, event.running + event.waiting)
        assert max(event.running for event in began) == min(32, max(arrivals.count(at_s) for at_s in arrivals))
        assert events[-1].running == events[-1].waiting == 0

    @pytest.mark.parametrize("joins", [True, False])
    def test_the_kv_limit_holds_for_tries(self, joins: bool) -> None:
        """Two documents shared by all: as many requests fit as their trie allows, not their sum."""

        def began(limit: int) -> list[BatchEvent]:
            kv: Any = TrieKV(key=str, tokens=lambda document: 1000, own_tokens=lambda question: 10)
            batching = BacklogAware()
            found = ["shared", "too"]
            events = run_virtual(served([0.0] * 40, joins=joins, batching=batching, found=found, kv=kv, kv_limit=limit))
            return [event for event in events if event.event == "began"]

        events = began(2200)
        assert max(event.running for event in events) == 20
        assert all(event.kv_tokens is not None and event.kv_tokens <= 2200 for event in events)
        # A request that does not fit is served alone.
        assert {event.running for event in began(5)} == {1}

    @pytest.mark.parametrize("joins", [True, False])
    def test_learnt_times_belong_to_the_number_that_ran(self, joins: bool) -> None:
        samples: list[tuple[int, float]] = []

        class Noted(BacklogAware):
            def learn(self, size: int, seconds: float) -> None:
                samples.append((size, round(seconds, 6)))

        run_virtual(served([0.0] * 20, joins=joins, batching=Noted(PowerLaw(1.0, 0.1).__call__)))
        assert set(samples) == {(20, round(0.001 + 20**0.4, 6))}
