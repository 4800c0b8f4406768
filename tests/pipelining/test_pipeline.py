"""The pipeline: warm-up and dynamic speculation around a played engine and a played search."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.waiting import turns, until

from ragorder.pipelining import (
    AnswerChunk,
    EngineLoad,
    Pipeline,
    Provisional,
    SpeculationGain,
    SyncPipeline,
    Usage,
    WarmUp,
    plain_retrieval,
    staged_retrieval,
)
from ragorder.pipelining.load import prefill_batch
from ragorder.pipelining.speculation import Speculation


@dataclass(frozen=True)
class Sent:
    """A request: the question and its documents, in the order in which the prompt has them."""

    question: str
    documents: tuple[str, ...]

    @property
    def prompt_tokens(self) -> int:
        return 100 * len(self.documents)


class PlayedEngine:
    """Answers with the documents of the prompt, one a chunk, each once the gate is open; counts what it holds."""

    def __init__(self, *, free: bool = True) -> None:
        self.sent: list[Sent] = []
        self.running: list[Sent] = []
        self.aborted: list[Sent] = []
        self.ended: list[Sent] = []
        self.broken: Exception | None = None
        self.gate = asyncio.Event()
        if free:
            self.gate.set()

    async def stream(self, request: Sent, /) -> AsyncGenerator[AnswerChunk, None]:
        self.sent.append(request)
        if self.broken is not None:
            raise self.broken
        self.running.append(request)
        whole = False
        try:
            for document in request.documents:
                await self.gate.wait()
                await asyncio.sleep(0)
                yield AnswerChunk(f"{document} ")
            await self.gate.wait()
            yield AnswerChunk("", Usage(request.prompt_tokens, 0, len(request.documents)))
            whole = True
        finally:
            self.running.remove(request)
            (self.ended if whole else self.aborted).append(request)


@dataclass
class PlayedCommitment:
    request: Sent
    finished: list[str]

    def confirm(self, usage: Usage | None, /) -> None:
        self.finished.append("confirmed" if usage else "confirmed without usage")

    def discard(self) -> None:
        self.finished.append("discarded")


@dataclass
class PlayedPrompts:
    """Documents in alphabetical order, or, once `turned`, the other way round; `gate` opens with the first answer."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    finished: list[str] = field(default_factory=list)
    turned: bool = False
    broken: bool = False

    def preview(self, question: str, documents: Sequence[str], /) -> Sent:
        if self.broken:
            raise RuntimeError("no prompt")
        return Sent(question, tuple(sorted(documents, reverse=self.turned)))

    def commit(self, question: str, documents: Sequence[str], /) -> PlayedCommitment:
        self.gate.set()
        return PlayedCommitment(Sent(question, tuple(sorted(documents, reverse=self.turned))), self.finished)


class Search:
    """Shows these documents, one stage after another; `after` is called when so many stages are over."""

    def __init__(self, *stages: str, after: dict[int, object] | None = None, pauses: int = 20) -> None:
        self.stages = stages
        self.after = after or {}
        self.pauses = pauses
        self.closed = 0

    async def __call__(self, question: str) -> AsyncGenerator[Provisional[str], None]:
        try:
            for number, documents in enumerate(self.stages, 1):
                for _ in range(self.pauses):
                    await asyncio.sleep(0)
                yield Provisional(list(documents), final=number == len(self.stages))
                event = self.after.get(number)
                if isinstance(event, Exception):
                    raise event
                if callable(event):
                    event()
        finally:
            self.closed += 1


def pipeline(search: Search, engine: PlayedEngine | None = None, room: int = 4, **options: Any) -> Pipeline:
    parts = {"prompts": PlayedPrompts(), "load": EngineLoad(room) if room else None} | options
    return Pipeline(search, parts.pop("prompts"), engine or PlayedEngine(), key=str, **parts)


async def no_tasks_left() -> None:
    await turns(5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class TestSpeculation:
    async def test_the_example_of_figure_13(self) -> None:
        """[D1, D3], [D1, D2], [D1, D2], [D1, D2]: the second speculation is the answer."""
        engine = PlayedEngine(free=False)
        search = Search("AC", "AB", "AB", "AB", after={3: engine.gate.set})
        stream = await pipeline(search, engine).answer("q")
        assert stream.text == "A B " and stream.usage == Usage(200, 0, 2)
        assert [request.documents for request in engine.sent] == [("A", "C"), ("A", "B")]
        assert [request.documents for request in engine.aborted] == [("A", "C")]
        trace = stream.trace
        assert (trace.stages, trace.speculations, trace.right, trace.speculated_stage) == (4, 2, True, 2)
        assert trace.wasted_prompt_tokens == 200
        assert trace.exposed_search_s is not None and trace.retrieval_s is not None
        assert trace.exposed_search_s < trace.retrieval_s <= (trace.first_token_s or 0) <= (trace.total_s or 0)
        await no_tasks_left()

    async def test_a_wrong_speculation_is_aborted_and_the_answer_generated_again(self) -> None:
        engine = PlayedEngine(free=False)
        prompts = PlayedPrompts(engine.gate)
        stream = await pipeline(Search("AC", "AB"), engine, prompts=prompts).answer("q")
        assert stream.text == "A B "
        assert engine.ended == [Sent("q", ("A", "B"))] and engine.aborted == [Sent("q", ("A", "C"))]
        trace = stream.trace
        assert (trace.right, trace.speculated_stage, trace.wasted_prompt_tokens) == (False, None, 200)
        assert trace.exposed_search_s == trace.retrieval_s
        assert prompts.finished == ["confirmed"]
        await no_tasks_left()

    async def test_documents_that_change_places_and_make_the_same_prompt_are_no_change(self) -> None:
        engine = PlayedEngine()
        stream = await pipeline(Search("AB", "BA", "AB"), engine).answer("q")
        assert (stream.text, len(engine.sent)) == ("A B ", 1)
        assert stream.trace.right and stream.trace.speculated_stage == 1 and not stream.trace.wasted_prompt_tokens

    async def test_same_documents_in_another_order_of_the_prompt_are_another_request(self) -> None:
        prompts = PlayedPrompts()
        search = Search("AB", "AB", after={1: lambda: setattr(prompts, "turned", True)})
        stream = await pipeline(search, prompts=prompts).answer("q")
        assert stream.text == "B A " and not stream.trace.right

    async def test_nothing_is_given_out_before_the_search_has_ended(self) -> None:
        seen: list[str] = []
        search = Search("A", "A", "A", after={2: lambda: seen.append(stream.text)})
        async with pipeline(search).stream("q") as stream:
            seen += [stream.text async for _ in stream]
        assert seen == ["", "A "]

    async def test_without_load_or_a_prompt_there_is_no_speculation(self) -> None:
        for options in ({"load": None}, {"prompts": PlayedPrompts(broken=True)}):
            engine = PlayedEngine()
            stream = await pipeline(Search("A", "B"), engine, **options).answer("q")
            assert stream.text == "B " and engine.sent == [Sent("q", ("B",))] and stream.trace.speculations == 0

    @given(
        stages=st.lists(st.text("ABC", min_size=0, max_size=3), min_size=1, max_size=6),
        room=st.integers(0, 3),
        pauses=st.integers(0, 12),
    )
    @example(stages=[""], room=1, pauses=0)
    @example(stages=["ABC", "ABC", "ABC"], room=1, pauses=50)
    async def test_the_answer_is_that_without_speculation(self, stages: list[str], room: int, pauses: int) -> None:
        engine = PlayedEngine()
        plain = await pipeline(Search(*stages), room=0).answer("q")
        stream = await pipeline(Search(*stages, pauses=pauses), engine, room).answer("q")
        assert (stream.text, stream.usage) == (plain.text, plain.usage)
        assert not engine.running
        assert len(engine.ended) + len(engine.aborted) == len(engine.sent) <= stream.trace.speculations + 1
        await no_tasks_left()


class TestLoad:
    async def test_no_speculation_without_room(self) -> None:
        engine, load = PlayedEngine(), EngineLoad(1)
        with load.prefilling():
            stream = await pipeline(Search("A", "B", "B"), engine, load=load).answer("q")
        assert stream.text == "B " and engine.sent == [Sent("q", ("B",))]
        assert (stream.trace.speculations, stream.trace.refused) == (0, 2)

    async def test_a_refused_one_is_tried_again_after_the_next_stage(self) -> None:
        others = [1]
        load = EngineLoad(1, reported=lambda: len(others))
        stream = await pipeline(Search("A", "A", "A", after={1: others.clear}), load=load).answer("q")
        assert stream.trace.refused == 1 and stream.trace.right and stream.trace.speculated_stage == 2

    async def test_a_report_that_fails_costs_no_answer(self, caplog: pytest.LogCaptureFixture) -> None:
        def reported() -> int:
            raise ConnectionError("a secret")

        stream = await pipeline(Search("A", "A", "A"), load=EngineLoad(1, reported)).answer("q")
        assert stream.text == "A " and stream.trace.right
        assert [record.message for record in caplog.records] == [
            "the engine's report failed: ConnectionError; later failures are not logged"
        ]

    async def test_pending_are_those_without_a_first_token(self) -> None:
        engine, load = PlayedEngine(free=False), EngineLoad(2)
        task = asyncio.create_task(pipeline(Search("A"), engine, load=load).answer("q"))
        await turns(50)
        assert load.pending == 1 and load.has_room
        engine.gate.set()
        await task
        assert load.pending == 0

    async def test_an_aborted_speculation_leaves_its_place(self) -> None:
        engine, load = PlayedEngine(free=False), EngineLoad(1)
        one = pipeline(Search("A", "B", "C", "D"), engine, load=load, prompts=PlayedPrompts(engine.gate))
        stream = await one.answer("q")
        assert stream.trace.speculations == 3 and stream.trace.refused == 0 and load.pending == 0

    def test_what_is_admitted_is_pending_until_it_is_sent(self) -> None:
        """Beside those that the engine reports, unless we count more."""
        load = EngineLoad(2, reported=lambda: 1)
        admission = load.admit()
        assert admission is not None
        assert load.pending == 2 and load.admit() is None
        for _ in range(2):
            admission.end()
            assert load.pending == 1
        assert load.admit() is not None
        assert EngineLoad(3, reported=lambda: None).pending == 0

    async def test_one_that_is_cancelled_before_it_begins_leaves_its_place(self) -> None:
        engine, load = PlayedEngine(), EngineLoad(1)
        admission = load.admit()
        assert admission is not None
        speculation = Speculation(engine, Sent("q", ("A",)), load, admission, at_s=0.0)
        speculation.cancel()
        await speculation.ended()
        assert load.pending == 0 and not engine.sent

    def test_the_prefill_batch_is_what_one_iteration_computes(self) -> None:
        assert prefill_batch(8192, 1500) == 5 and prefill_batch(512, 4000) == 1
        with pytest.raises(ValueError, match="max_prefill_bs"):
            EngineLoad(0)


class TestOdds:
    @pytest.mark.parametrize(
        ("right", "left_s", "prefill_s", "favoured"),
        [
            # A wrong one is over before the search is: it costs nobody's time.
            (0.0, 1.0, 1.0, True),
            (0.25, 0.5, 0.5, True),
            # 3/4 of 0.2 s saved, 1/4 of 0.8 s lost.
            (0.75, 0.2, 1.0, False),
            (0.75, 0.3, 1.0, True),
            (1.0, 0.01, 1.0, True),
            (0.5, 0.01, None, True),
        ],
    )
    def test_weigh_gains_and_losses(self, right: float, left_s: float, prefill_s: float | None, favoured: bool) -> None:
        gain = SpeculationGain()
        for number in range(4):
            gain.learn([(number < 4 * right, left_s)])
        assert gain.worthwhile(1, prefill_s) is favoured

    def test_odds_of_an_unseen_stage_are_good(self) -> None:
        gain = SpeculationGain()
        gain.learn([(False, 0.0)])
        assert not gain.worthwhile(1, 1.0) and gain.worthwhile(2, 1.0)

    def test_change_with_the_searches(self) -> None:
        gain = SpeculationGain()
        for _ in range(100):
            gain.learn([(False, 0.1)])
        needed = 0
        while not gain.worthwhile(1, 1.0):
            gain.learn([(True, 0.1)])
            needed += 1
        assert 10 < needed < 60

    async def test_are_learnt_from_searches_without_speculation_too(self) -> None:
        load, gain = EngineLoad(1), SpeculationGain()
        with load.prefilling():
            for _ in range(3):
                await pipeline(Search("A", "B", "B"), load=load, gain=gain).answer("q")
        assert not gain.worthwhile(1, 60.0) and gain.worthwhile(2, 60.0)

    async def test_against_it_are_asked_again_after_the_next_stage(self) -> None:
        load, gain = EngineLoad(1), SpeculationGain()
        with load.prefilling() as started:
            started()
        gain.learn([(False, 0.0), (True, 1.0)])
        trace = (await pipeline(Search("A", "A", "A"), load=load, gain=gain).answer("q")).trace
        assert (trace.declined, trace.refused, trace.speculations) == (1, 0, 1)
        assert trace.right and trace.speculated_stage == 2

    def test_know_how_long_a_first_token_takes(self) -> None:
        now_s = [0.0]
        load = EngineLoad(4, clock=lambda: now_s[0])
        assert load.prefill_s is None
        for seconds in (1.0, 3.0, 5.0):
            with load.prefilling() as started:
                now_s[0] += seconds
                if seconds < 5.0:
                    started()
                now_s[0] += 7.0
                # Nor does a second chunk count.
                if seconds < 5.0:
                    started()
        assert load.prefill_s == 2.0 and load.pending == 0


class TestFaults:
    async def test_retrieval_that_raises_ends_the_speculation(self) -> None:
        engine, prompts = PlayedEngine(free=False), PlayedPrompts()
        search = Search("A", "A", "A", after={2: TimeoutError("index")})
        with pytest.raises(TimeoutError, match="index"):
            await pipeline(search, engine, prompts=prompts).answer("q")
        assert engine.aborted == [Sent("q", ("A",))] and not engine.running and search.closed == 1
        assert prompts.finished == []
        await no_tasks_left()

    @pytest.mark.parametrize("stays", [True, False])
    async def test_an_engine_that_dies_during_a_speculation_is_asked_again(self, stays: bool) -> None:
        engine, prompts = PlayedEngine(), PlayedPrompts()
        engine.broken = ConnectionError("gone")
        search = Search("A", "A", "A", after={} if stays else {2: lambda: setattr(engine, "broken", None)})
        answering = pipeline(search, engine, prompts=prompts).answer("q")
        if stays:
            with pytest.raises(ConnectionError, match="gone"):
                await answering
        else:
            stream = await answering
            assert stream.text == "A " and not stream.trace.right
        assert prompts.finished == ["discarded" if stays else "confirmed"]
        await no_tasks_left()

    async def test_a_speculation_that_breaks_once_it_was_taken_is_sent_again(self) -> None:
        engine = PlayedEngine(free=False)

        async def stream(request: Sent, /) -> AsyncGenerator[AnswerChunk, None]:
            engine.sent.append(request)
            await engine.gate.wait()
            if len(engine.sent) == 1:
                raise ConnectionError("gone")
            yield AnswerChunk("whole")

        engine.stream = stream  # type: ignore[method-assign]
        answered = await pipeline(Search("A", "A"), engine, prompts=PlayedPrompts(engine.gate)).answer("q")
        assert answered.text == "whole" and not answered.trace.right

    async def test_one_that_breaks_after_its_first_piece_raises(self) -> None:
        prompts = PlayedPrompts()

        class Breaking(PlayedEngine):
            async def stream(self, request: Sent, /) -> AsyncGenerator[AnswerChunk, None]:
                yield AnswerChunk("half")
                raise ConnectionError("gone")

        with pytest.raises(ConnectionError):
            await pipeline(Search("A", "A"), Breaking(), prompts=prompts).answer("q")
        assert prompts.finished == ["confirmed without usage"]

    @pytest.mark.parametrize(("tokens", "tbt_s"), [(3, 5.0), (1, None), (None, None)])
    async def test_the_time_between_tokens_leaves_out_the_first(self, tokens: int | None, tbt_s: float | None) -> None:
        """Of three tokens, the last ten seconds after the first."""
        now_s = [0.0]

        class Timed(PlayedEngine):
            async def stream(self, request: Sent, /) -> AsyncGenerator[AnswerChunk, None]:
                for text in ("", "b", "c"):
                    now_s[0] += 5.0
                    yield AnswerChunk(text)
                now_s[0] += 100.0
                yield AnswerChunk("", Usage(10, 0, tokens))

        stream = await pipeline(Search("A"), Timed(), room=0, clock=lambda: now_s[0]).answer("q")
        assert stream.tbt_s == tbt_s
        assert (stream.trace.last_token_s or 0) - (stream.trace.first_token_s or 0) == 10.0

    @pytest.mark.parametrize("pauses", [0, 1, 5, 25, *range(40, 61), 100])
    async def test_a_caller_that_cancels_leaves_nothing_running(self, pauses: int) -> None:
        """After so many steps of the event loop; also if it cancels during an abort, which takes some more."""

        class Slow(PlayedEngine):
            async def stream(self, request: Sent, /) -> AsyncGenerator[AnswerChunk, None]:
                self.running.append(request)
                try:
                    await self.gate.wait()
                    yield AnswerChunk("")
                finally:
                    await turns(8)
                    self.running.remove(request)

        for engine in (PlayedEngine(free=False), Slow(free=False)):
            prompts, load = PlayedPrompts(), EngineLoad(4)
            one = pipeline(Search("A", "B", "C", "C"), engine, prompts=prompts, load=load)
            task = asyncio.create_task(one.answer("q"))
            await turns(pauses)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not engine.running and load.pending == 0 and prompts.finished in ([], ["discarded"])
            await no_tasks_left()

    async def test_closing_a_stream_early_aborts_the_request(self) -> None:
        engine, prompts = PlayedEngine(), PlayedPrompts()
        async with pipeline(Search("ABC"), engine, prompts=prompts).stream("q") as stream:
            assert await anext(stream) == "A "
        assert engine.aborted == [Sent("q", ("A", "B", "C"))] and prompts.finished == ["confirmed without usage"]

    async def test_closing_a_stream_waits_for_a_reader_that_is_being_cancelled(self) -> None:
        class Slow(PlayedEngine):
            async def stream(self, request: Sent, /) -> AsyncGenerator[AnswerChunk, None]:
                try:
                    async for chunk in super().stream(request):
                        yield chunk
                finally:
                    await turns(8)
                    self.ended.append(request)

        engine = Slow(free=False)
        stream = pipeline(Search("A"), engine).stream("q")
        reader = asyncio.ensure_future(anext(stream, None))
        await until(lambda: engine.sent)
        reader.cancel()
        await stream.close()
        assert engine.ended == [Sent("q", ("A",))] and await anext(stream, None) is None
        with pytest.raises(asyncio.CancelledError):
            await reader
        await no_tasks_left()


class PlayedPrefix:
    def __init__(self, *, cached: bool = False) -> None:
        self.cached = cached
        self.prefilled: list[str] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    def scope(self, question: str, /) -> str:
        return question[:1]

    def is_cached(self, question: str, /) -> bool:
        return self.cached

    async def prefill(self, question: str, /) -> None:
        self.prefilled.append(question)
        if self.error is not None:
            raise self.error
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted.append(question)
            raise


class TestWarmUp:
    @pytest.mark.parametrize("cached", [False, True])
    async def test_it_runs_during_retrieval_where_the_engine_is_cold(self, cached: bool) -> None:
        prefix = PlayedPrefix(cached=cached)
        seen: list[list[str]] = []
        search = Search("A", "A", after={1: lambda: seen.append(list(prefix.prefilled))})
        assert (await pipeline(search, warm_up=WarmUp(prefix)).answer("q")).trace.warmed_up is not cached
        assert [prefix.prefilled] == seen == [[] if cached else ["q"]]
        await no_tasks_left()

    async def test_never_twice_at_once_in_a_scope(self) -> None:
        prefix = PlayedPrefix()
        warm_up = WarmUp(prefix)
        one = pipeline(Search("A", pauses=50), warm_up=warm_up)
        await asyncio.gather(*(one.answer(question) for question in ("a1", "a2", "b1", "a3")))
        assert prefix.prefilled == ["a1", "b1"] and warm_up.started == 2

    async def test_it_is_aborted_when_the_last_that_waits_has_its_documents(self) -> None:
        prefix = PlayedPrefix()
        warm_up = WarmUp(prefix)
        first, second = warm_up.start("a1"), warm_up.start("a2")
        assert first is not None and second is first
        for aborted in ([], ["a1"]):
            await turns(2)
            first.leave()
            await turns(2)
            assert prefix.aborted == aborted
        await no_tasks_left()

    async def test_one_that_is_being_aborted_is_not_joined(self) -> None:
        class Slow(PlayedPrefix):
            async def prefill(self, question: str, /) -> None:
                try:
                    await self.gate.wait()
                finally:
                    await turns(8)
                    self.aborted.append(question)

        prefix = Slow()
        warm_up = WarmUp(prefix)
        for question in ("a1", "a2"):
            warming = warm_up.start(question)
            await turns(2)
            assert warming is not None
            warming.leave()
            await turns(2)
            assert prefix.aborted == []
        assert warm_up.started == 2
        await turns(20)
        # No abort was interrupted by that of another.
        assert prefix.aborted == ["a1", "a2"]
        await no_tasks_left()

    async def test_retrieval_that_fails_aborts_it(self) -> None:
        prefix = PlayedPrefix()
        search = Search("A", "A", after={1: RuntimeError("index")})
        with pytest.raises(RuntimeError, match="index"):
            await pipeline(search, warm_up=WarmUp(prefix)).answer("q")
        await no_tasks_left()
        assert prefix.aborted == ["q"]

    async def test_a_failed_warm_up_is_not_raised(self) -> None:
        prefix = PlayedPrefix()
        prefix.error = ConnectionError("gone")
        warm_up = WarmUp(prefix)
        for started in (1, 2):
            assert (await pipeline(Search("A"), warm_up=warm_up).answer("q")).text == "A "
            assert warm_up.started == started

    async def test_closing_ends_it(self) -> None:
        prefix = PlayedPrefix()
        warm_up = WarmUp(prefix)
        warm_up.start("q")
        await asyncio.sleep(0)
        await warm_up.close()
        assert prefix.aborted == ["q"]
        await no_tasks_left()


class TestPlainRetrieval:
    async def test_any_retriever_will_do(self) -> None:
        async def coroutine(question: str) -> list[str]:
            return [question]

        class Object:
            async def __call__(self, question: str) -> list[str]:
                return [question]

        for retrieve in (lambda question: [question], coroutine, Object()):
            async with aclosing(plain_retrieval(retrieve)("q")) as stages:
                assert [stage async for stage in stages] == [Provisional(["q"], final=True)]

    @pytest.mark.parametrize("part", ["retrieve", "embed", "search"])
    async def test_one_that_finds_no_next_item_fails_its_question_and_holds_up_nobody(self, part: str) -> None:
        def first(*_: Any) -> Any:
            return next(iter(()))

        search: Any = SimpleNamespace(search=first)
        retrievals: dict[str, Any] = {
            "retrieve": plain_retrieval(first),
            "embed": staged_retrieval(search, first, str, top_k=1),
            "search": staged_retrieval(search, list, str, top_k=1),
        }
        async with asyncio.timeout(60):
            with pytest.raises(RuntimeError, match="StopIteration"):
                await pipeline(retrievals[part]).answer("q")


class TestSync:
    def test_the_answer_and_its_pieces(self) -> None:
        with SyncPipeline(lambda: pipeline(Search("AC", "AB", "AB"))) as sync:
            answered = sync.answer("q")
            assert answered.text == "A B " and answered.usage == Usage(200, 0, 2) and answered.trace.stages == 3
            assert list(sync.stream("q")) == ["A ", "B "]

    def test_errors_arrive(self) -> None:
        search = Search("A", "B", after={1: TimeoutError("index")})
        with SyncPipeline(lambda: pipeline(search)) as sync, pytest.raises(TimeoutError, match="index"):
            sync.answer("q")

        def fail() -> Pipeline:
            raise ValueError("no server")

        with pytest.raises(ValueError, match="no server"):
            SyncPipeline(fail)

    def test_closing_aborts_what_runs_and_then_it_says_so(self) -> None:
        engine = PlayedEngine()
        sync = SyncPipeline(lambda: pipeline(Search("ABC"), engine))
        stream = sync.stream("q")
        assert next(stream) == "A "
        stream.close()
        sync.close()
        assert len(engine.aborted) == 1
        sync.close()
        with pytest.raises(RuntimeError, match="closed"):
            sync.answer("q")
