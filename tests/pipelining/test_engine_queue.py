"""Due generations that wait for room on the engine: which one is next, and that none waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.waiting import turns, until

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.workflow_server import PlayedSearch, SlowEngine, eager, played_server, server_of
from support.workflows import Asked, PlainPrompts, chain

from ragorder.pipelining import AnswerChunk, CachedLengths, EngineLoad
from ragorder.pipelining.workflow import Generation, NodeQuestion, RAGraph, State, WorkflowServer, one_shot
from ragorder.pipelining.workflow.nodes import NodeRun
from ragorder.pipelining.workflow.result import WorkflowTrace, WorkItemTrace
from ragorder.pipelining.workflow.transformations import SpeculateGeneration, Split
from ragorder.pipelining.workflow.wavefront import Wavefront, WorkItem

CACHED = {"cold": 0, "warm": 50, "hot": 100}


class Prompts(PlainPrompts):
    """Of each prompt so much is cached as its question says."""

    def lengths(self, question: NodeQuestion, documents: Sequence[Any], /) -> Callable[[], CachedLengths] | None:
        name = question.text.split()[0]
        return (lambda: CachedLengths(CACHED[name], 10)) if name in CACHED else None


def plain_graph() -> Any:
    return chain(RAGraph("plain").add_generation("answer", prompt="{query}"), "answer").compile()


def queued(engine: SlowEngine, prompts: PlainPrompts, **options: Any) -> WorkflowServer[Any, Any]:
    return server_of(lambda vector, k: range(k), engine, prompts, (), **options)


def speculating(engine: SlowEngine, search: PlayedSearch, **options: Any) -> WorkflowServer[Any, Any]:
    """One generation at a time."""
    return played_server(engine, search, SpeculateGeneration(odds=False), Split(), **{"max_generations": 1} | options)


async def speculated(server: Any, search: PlayedSearch, engine: SlowEngine) -> asyncio.Task[Any]:
    """A request whose generation has begun before its search has ended."""
    run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
    await until(lambda: search.handles)
    search.next()
    await until(lambda: engine.sent)
    return run


async def order_of(questions: Sequence[str], prompts: PlainPrompts | None = None, **options: Any) -> list[str]:
    """In which generations reach the engine. All requests come at once."""
    engine, graph = SlowEngine(), plain_graph()
    async with queued(engine, prompts or Prompts(), max_requests=1000, **options) as server:
        results = await asyncio.gather(*(server.run(graph, question) for question in questions))
        assert server.wavefront.count("engine") == len(server.wavefront.queue) == 0
    assert [result.text.split()[0] for result in results] == [
        engine.answer(Asked(NodeQuestion(question), ())).split()[0] for question in questions
    ]
    return [request.question.text for request in engine.sent]


async def test_the_generation_with_most_of_its_prompt_cached_is_next() -> None:
    found = await order_of(["cold 0", "cold 1", "warm 2", "hot 3", "other 4", "hot 5"], max_generations=1)
    assert found == ["hot 3", "hot 5", "warm 2", "cold 0", "cold 1", "other 4"]


async def test_without_a_limit_predictions_or_a_window_the_oldest_is_next() -> None:
    questions = ["cold 0", "hot 1", "warm 2", "hot 3"]
    assert await order_of(questions) == questions
    assert await order_of(questions, PlainPrompts(), max_generations=1) == questions
    assert await order_of(questions, max_generations=1, window=0) == questions


async def test_the_next_choice_sees_what_the_last_one_has_sent() -> None:
    """A prompt is cached once another with the same first word has been committed."""
    committed: list[str] = []

    class Remembering(PlainPrompts):
        def commit(self, question: NodeQuestion, documents: Sequence[Any], /) -> Any:
            committed.append(question.text)
            return super().commit(question, documents)

        def lengths(self, question: NodeQuestion, documents: Sequence[Any], /) -> Callable[[], CachedLengths]:
            name = question.text.split()[0]
            return lambda: CachedLengths(100.0 * any(text.startswith(name) for text in committed), 10)

    questions = [f"{'ab'[number % 2]} {number}" for number in range(8)]
    # Two places are free at first; the second choice knows the first.
    assert await order_of(questions, Remembering(), max_generations=2) == [*questions[::2], *questions[1::2]]


async def test_one_that_is_cancelled_while_it_waits_leaves_the_queue() -> None:
    engine, graph = SlowEngine(pause_s=0.001), plain_graph()
    async with queued(engine, Prompts(), max_generations=1) as server:
        runs = [asyncio.create_task(server.run(graph, f"cold {number}")) for number in range(3)]
        await until(lambda: engine.sent)
        assert len(server.wavefront.queue) == 2
        runs[1].cancel()
        await asyncio.gather(runs[0], runs[2])
        assert len(server.wavefront.queue) == 0
    assert [request.question.text for request in engine.sent] == ["cold 0", "cold 2"]


@pytest.mark.parametrize("last", [1, 2])
async def test_a_due_generation_has_the_place_of_its_speculation(last: int) -> None:
    """Right or wrong: it must not wait for the speculation's end, which waits for it."""
    engine, search = SlowEngine(pause_s=0.001), PlayedSearch([1], [last])
    async with speculating(engine, search) as server:
        run = await speculated(server, search, engine)
        assert server.wavefront.count("engine", speculative=True) == 1
        search.next()
        async with asyncio.timeout(60):
            assert (await run).state["docs"] == (f"document {last}",)
        assert server.wavefront.count("engine") == 0


@pytest.mark.parametrize("last", [1, 2])
async def test_a_speculation_that_has_been_answered_leaves_its_place_to_others(last: int) -> None:
    """Its search may take long; whether it was right shows at its end."""
    engine, search = SlowEngine(), PlayedSearch([1], [last])
    async with speculating(engine, search) as server:
        run = await speculated(server, search, engine)
        await until(lambda: not engine.running)
        async with asyncio.timeout(60):
            other = await server.run(plain_graph(), "plain")
        assert other.trace.pieces[0].outcome == "used" and not run.done()
        assert server.wavefront.count("engine") == 0
        search.next()
        result = await run
        assert result.state["docs"] == (f"document {last}",)
        outcomes = [(piece.kind, piece.outcome) for piece in result.trace.pieces if piece.worker == "engine"]
        assert ("speculative", "used" if last == 1 else "rolled back") in outcomes
        assert server.wavefront.count("engine") == 0
    assert len(engine.sent) == (2 if last == 1 else 3)


class Held(SlowEngine):
    """Goes on with one question when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def stream(self, request: Asked, /) -> Any:
        async for chunk in super().stream(request):
            if request.question.text == "held":
                await self.go_on.wait()
            yield chunk


@pytest.mark.parametrize("last", [1, 2])
async def test_an_answered_speculation_that_was_wrong_overtakes_none(last: int) -> None:
    """And one that was right waits for none."""
    engine, search = Held(), PlayedSearch([1], [last])
    async with speculating(engine, search) as server:
        run = await speculated(server, search, engine)
        await until(lambda: not engine.running)
        others = [asyncio.create_task(server.run(plain_graph(), "held"))]
        await until(lambda: engine.running)
        others.append(asyncio.create_task(server.run(plain_graph(), "second")))
        await until(lambda: server.wavefront.queue)
        search.next()
        await turns(200)
        assert run.done() == (last == 1)
        engine.go_on.set()
        await asyncio.gather(run, *others)
    assert [request.question.text for request in engine.sent[1:3]] == ["held", "second"]
    assert len(engine.sent) == (3 if last == 1 else 4)


class SlowAborts(SlowEngine):
    """Requests that are aborted stay for some turns of the event loop."""

    most = 0

    async def stream(self, request: Asked, /) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.sent.append(request)
            for word in self.answer(request).split():
                await asyncio.sleep(0)
                yield AnswerChunk(f"{word} ")
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self.running -= 1


@pytest.mark.parametrize("limit", [1, 3])
async def test_the_bound_holds_while_the_engine_aborts(limit: int) -> None:
    """Wrong speculations, callers that are cancelled, and others that take their places."""
    engine, search = SlowAborts(), PlayedSearch([1], [2], [3])
    async with played_server(engine, search, *eager(), load=EngineLoad(8), max_generations=limit) as server:
        runs = [asyncio.create_task(server.run(one_shot(topk=1).compile(), f"why {n}?")) for n in range(24)]
        async with asyncio.timeout(60):
            for run in runs[:10]:
                for _ in range(7):
                    search.next()
                    await asyncio.sleep(0)
                run.cancel()
            await search.play(*runs)
        assert server.wavefront.count("engine") == engine.running == 0
    assert engine.most == limit
    assert {run.result().state["docs"] for run in runs if not run.cancelled()} == {("document 3",)}


async def test_nothing_is_speculated_on_while_a_due_generation_waits() -> None:
    engine, search = SlowEngine(pause_s=0.01), PlayedSearch([1], [1])
    async with speculating(engine, search, load=EngineLoad(16)) as server:
        plain = [asyncio.create_task(server.run(plain_graph(), f"plain {number}")) for number in range(2)]
        run = await speculated(server, search, engine)
        await asyncio.gather(*plain)
        search.next()
        trace = (await run).trace
    assert trace.refused == 1 and all(piece.kind == "due" for piece in trace.pieces)


class Request:
    """A request none of whose generations has a place."""

    def is_speculated(self, piece: WorkItem, /) -> bool:
        return False

    def lengths(self, piece: WorkItem, /) -> None:
        return None


def generation(**options: Any) -> WorkItem:
    run = NodeRun(Generation("answer", "{query}"), "answer", 0, State.of("why?", {}))
    request: Any = Request()
    request.trace = WorkflowTrace("plain")
    return WorkItem(request, run, WorkItemTrace("answer", "due", "engine"), **options)


@pytest.mark.parametrize("limit", [None, 1])
def test_due_generations_are_counted_before_they_are_sent(limit: int | None) -> None:
    wavefront = Wavefront(lambda: None, limit)
    first, second = generation(), generation()
    wavefront.add(first)
    wavefront.add(second)
    assert wavefront.unsent == 2
    assert wavefront.take() == ([first, second] if limit is None else [first])
    assert wavefront.unsent == (0 if limit is None else 1)
    wavefront.end(first, "used", 1.0)
    assert wavefront.take() == ([] if limit is None else [second])
    assert wavefront.unsent == 0


def test_wrong_limits_are_refused() -> None:
    for options, message in (
        ({"limit": 0}, "max_generations must be at least 1, or None, got 0"),
        ({"window": -1}, "window must not be negative"),
    ):
        with pytest.raises(ValueError, match=message):
            Wavefront(lambda: None, **options)
