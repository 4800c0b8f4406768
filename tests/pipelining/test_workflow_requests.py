"""Requests to a server of workflows: streams, batches, limits, and nodes that fail for themselves alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import ContextVar
from statistics import mean
from typing import Any

import pytest
from support.waiting import until

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.workflow_server import (
    N,
    PlayedSearch,
    SlowEngine,
    broken,
    document,
    eager,
    eager_server,
    interpreted,
    long_answer,
    server_of,
    settled,
    small_index,
    vector,
)
from support.workflows import Asked, PlainPrompts, chain

from ragorder.pipelining import AnswerChunk, ContinuousIVF, QueueFullError, WarmUp
from ragorder.pipelining.search import History
from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    NodeError,
    RAGraph,
    WorkflowResult,
    WorkflowServer,
    irg,
    multistep,
    one_shot,
)
from ragorder.pipelining.workflow.result import WorkflowTrace
from ragorder.pipelining.workflow.transformations import (
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
    WarmSystemPrompt,
)


class TestServer:
    @pytest.mark.parametrize(("make", "whole"), [(one_shot, False), (lambda: irg(rounds=2), True)])
    async def test_streams_the_answer_as_it_is_generated(self, search: ContinuousIVF, make: Any, whole: bool) -> None:
        """Unless a later node could change it."""
        engine = SlowEngine(lambda request: f" \n {long_answer(request)} \n")
        async with server_of(search, engine) as server, server.stream(make().compile(), "why?") as stream:
            pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.text == stream.result.text and stream.trace.outcome == "answered"
        assert len(pieces) == 1 if whole else len(pieces) > 10

    async def test_nodes_run_in_the_context_of_their_own_request(self, search: ContinuousIVF) -> None:
        """Spans and tenants in context variables: of steps, functions, embeddings and generations, due or ahead."""
        tenant: ContextVar[str] = ContextVar("tenant")
        seen: set[tuple[str, str]] = set()

        def note(text: str) -> str:
            seen.add((tenant.get(), text))
            return text

        async def step(state: Any) -> dict[str, Any]:
            note(state["query"])
            return {}

        async def embed(query: str) -> Any:
            return vector(note(query))

        class Noting(SlowEngine):
            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                note(request.question.text)
                async for chunk in super().stream(request):
                    yield chunk

        graph = RAGraph("noted").add_step("note", step, pure=True)
        graph.add_retrieval("search", query=lambda state: note(state["query"]))
        graph.add_generation("guess", prompt="{query}", output="guess")
        graph.add_generation("answer", prompt="{query}", documents="docs")
        compiled = chain(graph, "note", "guess", "search", "answer").compile()
        async with eager_server(Noting(), search, embed) as server:

            async def ask(name: str) -> WorkflowTrace:
                tenant.set(name)
                return (await server.run(compiled, name)).trace

            traces = await asyncio.gather(*map(ask, "abcd"))
        assert seen == {(name, name) for name in "abcd"}
        assert any(piece.kind == "speculative" for trace in traces for piece in trace.pieces)

    async def test_an_answer_that_a_loop_leads_to_is_generated_once_and_streamed(self, search: ContinuousIVF) -> None:
        """Each round leads to it beside the decision to search again: what the last one has found counts."""
        graph = RAGraph("rounds", max_rounds=2)
        graph.add_step("count", lambda state: {"round": state.get("round", 0) + 1}, writes="round")
        graph.add_retrieval("search", query=lambda state: f"{state['query']} {state['round']}")
        graph.add_generation("answer", prompt="{query} {docs} {round}").add_step("look", lambda state: {})
        chain(graph, "count", "search", "answer").add_edge("search", "look")
        graph.add_edge("look", lambda state: "count" if state["round"] < 2 else END, to=("count", END))
        engine = SlowEngine(pause_s=0.001)
        async with server_of(search, engine) as server, server.stream(graph.compile(), "why?") as stream:
            pieces = [piece async for piece in stream]
        assert (stream.trace.rounds["search"], stream.trace.rounds["answer"]) == (2, 1)
        assert "".join(pieces) == stream.result.text and len(pieces) > 1
        assert engine.sent[-1].question.text == "why? the documents above 2"

    async def test_a_stream_that_is_left_early_frees_its_pieces(self, search: ContinuousIVF) -> None:
        engine, prompts = SlowEngine(pause_s=0.001), PlainPrompts()
        async with server_of(search, engine, prompts) as server:
            async with server.stream(one_shot().compile(), "why?") as stream:
                await anext(stream)
            assert stream.trace.outcome == "cancelled" and stream.result is None
            await settled(server, engine, search, prompts)

    async def test_a_batch_gives_each_question_its_result(self, search: ContinuousIVF, index: Any) -> None:
        def answer(request: Asked) -> str:
            return broken() if "question 3" in request.question.text else long_answer(request)

        graph, progress = one_shot().compile(), list[int]()
        questions = (f"question {number}" for number in range(20))
        async with server_of(search, SlowEngine(answer), max_requests=4) as server:
            batch = server.batch(graph, questions, on_progress=progress.append)
            results = {number: result async for number, result in batch}
        assert sorted(results) == list(range(20)) and progress == list(range(1, 21))
        failed = results.pop(3)
        assert isinstance(failed, NodeError) and "secret" not in str(failed)
        for number, result in results.items():
            assert result.text == (await interpreted(graph, index, f"question {number}")).text

    @pytest.mark.parametrize("max_waiting", [0, 2])
    async def test_a_full_queue_refuses_a_request_and_lets_a_batch_wait_for_its_turn(
        self, search: ContinuousIVF, max_waiting: int
    ) -> None:
        """Two batches at once, and requests that fill the queue: none of a batch is refused, all begin in order."""
        graph, engine = one_shot().compile(), SlowEngine(pause_s=0.001)
        async with server_of(search, engine, transformations=(), max_requests=2, max_waiting=max_waiting) as server:

            async def batch(name: str) -> dict[int, Any]:
                questions = (f"{name} {number}" for number in range(10))
                return {number: result async for number, result in server.batch(graph, questions)}

            runs = [asyncio.create_task(server.run(graph, f"single {number}")) for number in range(2 + max_waiting)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError):
                await server.run(graph, "one more")
            found = await asyncio.gather(batch("first"), batch("second"))
            await asyncio.gather(*runs)
        for results in found:
            assert sorted(results) == list(range(10))
            assert all(isinstance(result, WorkflowResult) for result in results.values())
        for name in ("single", "first", "second"):
            texts = [request.question.text for request in engine.sent if name in request.question.text]
            # Two run side by side.
            assert all(abs(place - int(text.split()[-1])) <= 1 for place, text in enumerate(texts))

    async def test_a_batch_that_is_left_early_leaves_the_queue(self, search: ContinuousIVF) -> None:
        graph, engine, prompts = one_shot().compile(), SlowEngine(pause_s=0.001), PlainPrompts()
        async with server_of(search, engine, prompts, max_requests=3, max_waiting=0) as server:
            single = asyncio.create_task(server.run(graph, "why?"))
            await asyncio.sleep(0)
            async with aclosing(server.batch(graph, (f"question {number}" for number in range(20)))) as results:
                await anext(results)
            await single
            await settled(server, engine, search, prompts)
            # None of the batch has a place before these.
            await asyncio.gather(*(server.run(graph, "why?") for _ in range(3)))

    @pytest.mark.parametrize(
        ("options", "error", "says"),
        [
            # Without its scope a request would share the prefixes of those that have none.
            (
                {"scpoe": "acme"},
                TypeError,
                "a request has no scpoe: its options are state, scope, deadline_s, on_limit, until",
            ),
            ({"on_limit": "stop"}, ValueError, "on_limit is 'stop': give 'return' or 'raise'"),
            ({"deadline_s": 0}, ValueError, "deadline_s is 0: give seconds above 0, or None"),
            ({"until": "found"}, ValueError, "until='found' is written by no node: give one of 'answer', 'docs'"),
        ],
    )
    async def test_wrong_options_are_refused(
        self, search: ContinuousIVF, options: dict[str, Any], error: Any, says: str
    ) -> None:
        graph = one_shot().compile()
        async with server_of(search) as server:
            with pytest.raises(error, match=says):
                await server.run(graph, "why?", **options)
            for ask in (server.stream, lambda *given, **options: server.batch(given[0], [given[1]], **options)):
                with pytest.raises(error, match=says):
                    ask(graph, "why?", **options)

    async def test_closing_ends_all_requests_and_takes_no_more(self, search: ContinuousIVF) -> None:
        graph, engine, prompts = multistep().compile(), SlowEngine(pause_s=0.002), PlainPrompts()
        server = server_of(search, engine, prompts, max_requests=3)
        runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(5)]
        await until(lambda: engine.sent)
        await server.close()
        for run in runs:
            with pytest.raises(RuntimeError, match="the server was closed"):
                await run
        with pytest.raises(RuntimeError, match="closed"):
            await server.run(graph, "late")
        await settled(server, engine, search, prompts)

    @pytest.mark.parametrize("part", ["step", "query", "prompt", "parse", "edge"])
    async def test_a_node_that_fails_ends_its_own_request_or_stream(
        self, search: ContinuousIVF, index: Any, part: str
    ) -> None:
        """Each is named, and no text is told."""
        parts: dict[str, Any] = {"step": lambda state: {}, "query": "query", "prompt": "{query} {docs}", "parse": None}
        parts[part] = broken
        graph = RAGraph("broken").add_step("step", parts["step"], pure=True)
        graph.add_retrieval("search", query=parts["query"])
        graph.add_generation("answer", prompt=parts["prompt"], documents="docs", parse=parts["parse"])
        graph.add_edge(START, "step").add_edge("step", "search").add_edge("search", "answer")
        graph.add_edge("answer", broken if part == "edge" else END, to=(END,) if part == "edge" else ())
        engine, prompts, good = SlowEngine(pause_s=0.0005), PlainPrompts(), one_shot().compile()
        expected = (await interpreted(good, index, "why?")).text
        async with server_of(search, engine, prompts, eager()) as server:
            failed, *others = await asyncio.gather(
                *(server.run(each, "why?") for each in (graph.compile(), good, good, good)), return_exceptions=True
            )
            assert isinstance(failed, NodeError)
            assert failed.node == {"step": "step", "query": "search"}.get(part, "answer")
            assert "InjectedError" in str(failed) and "secret" not in str(failed)
            assert [other.text for other in others] == [expected] * 3
            async with server.stream(graph.compile(), "why?") as stream:
                with pytest.raises(NodeError) as streamed:
                    assert not [piece async for piece in stream]
            assert str(streamed.value) == str(failed)
            await settled(server, engine, search, prompts)

    @pytest.mark.parametrize("name", ["CancelledError", "RuntimeError"])
    async def test_a_node_that_waits_for_something_cancelled_or_stops_an_iteration_ends_its_request(
        self, search: ContinuousIVF, name: str
    ) -> None:
        async def cancelled(state: Any) -> dict[str, Any]:
            task = asyncio.create_task(asyncio.sleep(3600))
            task.cancel()
            await task
            return {}

        step: Any = cancelled if name == "CancelledError" else lambda state: next(iter(()))
        graph = RAGraph("broken").add_step("step", step).add_generation("answer", prompt="{query}")
        engine, prompts = SlowEngine(), PlainPrompts()
        async with server_of(search, engine, prompts) as server:
            with pytest.raises(NodeError, match=f"workflow 'broken', node 'step': {name}"):
                async with asyncio.timeout(60):
                    await server.run(chain(graph, "step", "answer").compile(), "why?")
            await settled(server, engine, search, prompts)

    async def test_a_search_that_the_index_cannot_answer_ends_its_request_alone(self) -> None:
        """Another dimension, more results than vectors, a wrong setting, a closed search: each says what to change."""
        index = small_index()
        engine, prompts, good = SlowEngine(), PlainPrompts(), one_shot().compile()
        expected = (await interpreted(good, index, "why?")).text

        def embed(query: str) -> Any:
            return np.zeros(3) if query == "long" else vector(query)

        with ContinuousIVF(index, cores=1) as search:
            async with eager_server(engine, search, embed, document, prompts) as server:

                async def refused(graph: CompiledGraph = good, question: str = "why?", beside: int = 0) -> str:
                    others = [asyncio.create_task(server.run(good, "why?")) for _ in range(beside)]
                    with pytest.raises(NodeError) as raised:
                        await server.run(graph, question)
                    assert [(await other).text for other in others] == [expected] * beside
                    assert raised.value.node == "search"
                    return raised.value.failure

                assert await refused(question="long", beside=3) == "queries must have the shape (n, 8), got (1, 3)"
                many = await refused(one_shot(topk=N + 1).compile(), beside=3)
                assert many.startswith(f"k={N + 1}, but the index has {N} vectors")
                index.nprobe = 0
                assert await refused() == "the index has nprobe 0: set it to at least 1"
                index.nprobe = 8
                assert (await server.run(good, "why?")).text == expected
                search.close()
                assert await refused() == "this search is closed"
                await settled(server, engine, search, prompts)

    async def test_a_transformation_or_an_observer_that_fails_changes_nothing(
        self, search: ContinuousIVF, index: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Split):
            name = "broken"
            apply = broken

        class Unread(Split):
            name = "unread"
            reads_tokens = broken

        graph = irg().compile()
        async with (
            asyncio.timeout(60),
            server_of(search, transformations=(Unread(), Broken(), *eager()), observer=broken) as server,
        ):
            results = await asyncio.gather(*(server.run(graph, "why?") for _ in range(3)))
        assert {result.text for result in results} == {(await interpreted(graph, index, "why?")).text}
        assert [record.message for record in caplog.records] == [
            "broken failed: InjectedError; later failures are not logged",
            "unread failed: InjectedError; later failures are not logged",
            "observer failed: InjectedError; later failures are not logged",
        ]

    async def test_a_cold_system_prompt_is_warmed_during_the_search(self, search: ContinuousIVF) -> None:
        class Prefix:
            warmed = 0

            def scope(self, question: Any, /) -> Any:
                return question.scope

            def is_cached(self, question: Any, /) -> bool:
                return self.warmed > 0

            async def prefill(self, question: Any, /) -> None:
                self.warmed += 1

        prefix = Prefix()
        warm_up: WarmUp[Any] = WarmUp(prefix)
        async with server_of(search, transformations=(Split(), WarmSystemPrompt(warm_up))) as server:
            traces = [(await server.run(one_shot().compile(), "why?", scope="tenant")).trace for _ in range(2)]
        assert prefix.warmed == warm_up.started == 1
        assert ["warm_system_prompt" in trace.pieces[0].applied for trace in traces] == [True, False]
        await warm_up.close()

    async def test_the_trace_is_json_and_holds_no_text(self, search: ContinuousIVF) -> None:
        traces: list[WorkflowTrace] = []
        engine = SlowEngine(pause_s=0.001)
        async with server_of(search, engine, transformations=eager(), observer=traces.append) as server:
            result = await server.run(irg().compile(), "a secret question")
        (trace,) = traces
        assert result.trace is trace and trace.outcome == "answered"
        record = json.dumps(trace.as_record())
        assert not any(word in record for word in ("secret", "document 1", result.text.split()[0]))
        assert trace.rounds == {"search": 3, "answer": 3, "count": 3}
        due = [piece for piece in trace.pieces if piece.kind == "due"]
        assert [piece.node for piece in due] == ["search", "answer", "count"] * 3
        for piece in due:
            assert 0 <= piece.planned_s <= piece.started_s <= piece.ended_s <= trace.total_s
        assert due[0].clusters == 8 and due[0].stages >= 1 and due[1].tokens == 20 and due[1].prompt_tokens == 60

    async def test_a_transformation_is_told_after_which_share_of_a_search_nothing_changed(
        self, search: ContinuousIVF
    ) -> None:
        """Without a history, as a request's first search, and with one."""
        told: list[tuple[float | None, float | None, float]] = []

        class Always(Reorder):
            def apply(self, wavefront: Any, measured: Any, /) -> None:
                told.append((measured.settled.value, measured.settled_near.value, measured.hint))
                super().apply(wavefront, measured)

            def gain_s(self, *_: Any) -> float:
                return 1.0

        traces: list[WorkflowTrace] = []
        async with server_of(search, transformations=(Split(), Always()), observer=traces.append) as server:
            for query in ("why?", "who?", "what?"):
                await server.run(irg(rounds=3).compile(), query)
        searches = [[each for each in trace.pieces if each.worker == "search"] for trace in traces]
        shares = [[1 - each.settled / each.clusters for each in pieces] for pieces in searches]
        alone, near = mean(first for first, *_ in shares), mean(share for _, *others in shares for share in others)
        assert 0 < alone < 1 and 0 < near < 1
        assert told[-1] == pytest.approx((alone, near, alone - near))

    async def test_a_request_has_a_history_of_its_own(self, index: Any) -> None:
        """Two requests of the same queries: neither search of the second is ordered by those of the first."""
        histories: list[History | None] = []

        class Noting(ContinuousIVF):
            def submit(self, query: Any, k: int, *, history: History | None = None, **options: Any) -> Any:
                histories.append(history)
                return super().submit(query, k, history=history, **options)

        class Always(Reorder):
            def gain_s(self, piece: Any, facts: Any, /) -> float:
                return 1.0 if super().gain_s(piece, facts) else 0.0

        with Noting(index, cores=1) as search:
            async with server_of(search, transformations=(Split(), Always())) as server:
                for graph in (irg(rounds=2), irg(rounds=2), one_shot()):
                    await server.run(graph.compile(), "why?")
        first, again, second, third, alone = histories
        assert first is again and second is third and first is not second and len(first) == 2
        assert alone is None


def made(search: Any, embed: Any, found: Any) -> WorkflowServer[Any, Any]:
    return WorkflowServer(SlowEngine(), search, embed, found, PlainPrompts())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: made(PlayedSearch([1]), None, document), "embed is None: give it, since PlayedSearch takes vectors"),
        (lambda: made(PlayedSearch([1]), vector, None), "document is None: give it, since PlayedSearch takes vectors"),
        (lambda: made("index", vector, document), "search must be an index's search or a function, got str"),
        (lambda: SpeculateGeneration(0), "at least 1"),
        (lambda: SpeculateRetrieval(0), "at least 1"),
        (lambda: SpeculateRetrieval(every=0), "at least 1"),
        (lambda: SpeculateRetrieval(embeddings=0), "at least 1"),
        (lambda: server_of(PlayedSearch([1]), max_requests=0), "limit must be at least 1"),
        (lambda: server_of(PlayedSearch([1]), extra_tokens=-1), "extra_tokens must be at least 0, a share, or None"),
    ],
)
def test_what_cannot_serve_is_refused(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()
