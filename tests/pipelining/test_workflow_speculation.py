"""What a server of workflows begins before it is due: what is used, what is wasted, and when it pays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from support.rings import length
from support.waiting import turns, until

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.structured_flows import RandomFlow, RandomSpeeds
from support.workflow_server import (
    SMALL_PIECES,
    InjectedError,
    PlayedSearch,
    SlowEngine,
    document,
    eager,
    eager_server,
    long_answer,
    played_server,
    retriever,
    server_of,
    settled,
    vector,
)
from support.workflows import Asked, PlainPrompts, ScriptedEngine

from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.pipelining import AnswerChunk, ContinuousIVF, EngineLoad, Stage
from ragorder.pipelining.search import Budget
from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    RAGraph,
    WorkflowServer,
    hyde,
    interpret,
    irg,
    multistep,
    one_shot,
    recomp,
)
from ragorder.pipelining.workflow.result import WorkflowTrace, WorkItemTrace
from ragorder.pipelining.workflow.transformations import (
    OrderDocuments,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
    all_transformations,
)
from ragorder.pipelining.workflow.wavefront import WorkItem


def slow_planner() -> SlowEngine:
    """An engine whose plans have one short line and a long one."""
    return SlowEngine(lambda request: "first line\n" + "word " * 40, pause_s=0.001)


async def same(query: str) -> Any:
    return vector("same")


def speculative(trace: WorkflowTrace, worker: str) -> list[Any]:
    found = [piece for piece in trace.pieces if piece.kind == "speculative" and piece.worker == worker]
    assert found
    return found


class TestSpeculation:
    @pytest.mark.parametrize("kind", ["index", "function"])
    async def test_a_search_whose_query_is_written_early_is_used(
        self, index: Any, search: ContinuousIVF, kind: str
    ) -> None:
        """The first line of a plan is the first query: its search has begun before the plan ends."""
        parts = (search, vector, document) if kind == "index" else (retriever(index), None, None)
        trace = await self.traced(search, slow_planner(), multistep(rounds=2).compile(), parts)
        plan, early = trace.pieces[0], speculative(trace, "search")[0]
        first = next(piece for piece in trace.pieces if (piece.node, piece.kind) == ("search", "due"))
        assert early.outcome == "used" and early.started_s < plan.ended_s <= first.started_s

    async def test_a_search_ahead_of_need_that_fails_is_searched_again(self, index: Any) -> None:
        class Failing(ContinuousIVF):
            def submit(self, *args: Any, due: bool = True, **options: Any) -> Any:
                handle = super().submit(*args, due=due, **options)
                if not due:
                    handle.fail(InjectedError("a secret"))
                return handle

        with Failing(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
            trace = await self.traced(search, slow_planner(), multistep(rounds=2).compile())
        assert trace.outcome == "answered" and speculative(trace, "search")[0].outcome == "rolled back"

    async def test_a_query_that_changes_is_searched_again(self, index: Any, search: ContinuousIVF) -> None:
        words = " ".join(f"word{number}" for number in range(41))
        engine = SlowEngine(lambda request: words, pause_s=0.001)
        trace = await self.traced(search, engine, hyde().compile())
        assert {piece.outcome for piece in speculative(trace, "search")} == {"rolled back"}
        assert engine.sent[-1].documents == tuple(await retriever(index)(words, 5))

    @pytest.mark.parametrize("across", [True, False])
    async def test_a_generation_begins_on_what_a_search_ahead_of_need_has_found(
        self, index: Any, search: ContinuousIVF, across: bool
    ) -> None:
        """Whatever is guessed, the same documents are found, and the answer's prompt shows these alone."""
        engine, prompts, graph = SlowEngine(pause_s=0.002), PlainPrompts(), hyde().compile()
        expected = await interpret(
            graph,
            "why?",
            engine=ScriptedEngine(long_answer),
            prompts=prompts,
            retrieve=lambda _, topk: retriever(index)("same", topk),
        )
        chosen = (SpeculateGeneration(odds=False, across=across), *eager()[1:])
        async with eager_server(engine, search, same, document, prompts, transformations=chosen) as server:
            result = await server.run(graph, "why?")
            await settled(server, engine, search, prompts)
        assert result.text == expected.text
        guess, *others = result.trace.pieces
        ahead = [piece for piece in others if piece.kind == "speculative" and piece.worker == "engine"]
        used = [piece for piece in ahead if piece.outcome == "used"]
        assert guess.node == "guess" and len(used) <= 1
        if across:
            assert used[0].started_s < guess.ended_s
        else:
            assert all(piece.started_s >= guess.ended_s for piece in ahead)

    @pytest.mark.parametrize("node", ["search", "answer"])
    async def test_what_is_on_a_branch_that_is_not_taken_is_wasted(self, search: ContinuousIVF, node: str) -> None:
        """Half the text would lead to a search and an answer, the whole leads to the end."""
        words = [f"word{number}" for number in range(30)]
        graph = RAGraph("turns")
        graph.add_generation("think", prompt="{query}", output="text")
        graph.add_retrieval("search", query="text")
        graph.add_generation("answer", prompt="{docs} {query}")
        graph.add_edge(START, "think").add_edge("search", "answer").add_edge("answer", END)
        graph.add_edge("think", lambda state: END if words[-1] in state["text"] else "search", to=("search", END))
        engine = SlowEngine(lambda request: " ".join(words), pause_s=0.002)
        trace = await self.traced(
            search, engine, graph.compile(answer="text"), (search, same if node == "answer" else vector, document)
        )
        found = [piece for piece in trace.pieces if piece.node == node]
        assert found[-1].outcome == "wasted" and all(piece.kind == "speculative" for piece in found)
        assert "used" not in {piece.outcome for piece in found}

    async def test_a_prompt_that_shows_the_answer_before_it_is_not_tried_for_long(self, search: ContinuousIVF) -> None:
        """The second round's notes hold the first answer: what is generated beside that is never right."""
        generations = SpeculateGeneration()
        predicted = SpeculateRetrieval(generations=generations, known=False)
        chosen = (generations, predicted, *all_transformations()[2:])
        beside: list[int] = []
        async with server_of(search, SlowEngine(pause_s=0.004), transformations=chosen, extra_tokens=None) as server:
            for number in range(12):
                plan, *others = (await server.run(multistep(rounds=2).compile(), f"question {number}")).trace.pieces
                wrong = [each for each in others if each.stages_ahead == 2 and each.started_s > plan.ended_s]
                beside.append(sum(each.worker == "engine" for each in wrong))
        assert not any(beside[-4:])

    async def test_a_generation_that_is_not_taken_leaves_nothing(self) -> None:
        """Provisional documents would lead to an answer, the final ones end the request."""
        graph = RAGraph("turns").add_retrieval("search", query="query", topk=1)
        graph.add_generation("answer", prompt="{docs}")
        graph.add_edge(START, "search").add_edge("answer", END)
        graph.add_edge("search", lambda state: "answer" if "document 1" in state["docs"] else END, to=("answer", END))
        engine, search = SlowEngine(pause_s=0.001), PlayedSearch([1], [2])
        async with played_server(engine, search) as server:
            run = asyncio.create_task(server.run(graph.compile(answer="docs"), "why?"))
            await until(lambda: search.handles)
            search.next()
            await until(lambda: engine.running)
            search.next()
            trace = (await run).trace
            assert engine.running == 0 and server.wavefront.count("engine") == 0
        assert [(piece.kind, piece.outcome) for piece in trace.pieces] == [("due", "used"), ("speculative", "wasted")]

    async def test_a_due_generation_does_not_wait_for_a_wrong_one(self) -> None:
        """The engine takes its time to abort; the right request is sent meanwhile."""

        class Stuck(SlowEngine):
            aborted = asyncio.Event()

            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                wrong = request.documents == ("document 1",)
                try:
                    async for chunk in super().stream(request):
                        yield chunk
                        if wrong:
                            await asyncio.sleep(3600)
                finally:
                    if wrong:
                        await self.aborted.wait()

        engine, search = Stuck(), PlayedSearch([1], [2])
        async with played_server(engine, search) as server:
            run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
            while len(engine.sent) < 2 or engine.running > 1:
                search.next()
                await asyncio.sleep(0)
            assert not run.done() and not engine.aborted.is_set()
            assert [request.documents for request in engine.sent] == [("document 1",), ("document 2",)]
            await turns(100)
            # The engine is not done yet.
            assert not run.done()
            engine.aborted.set()
            trace = (await run).trace
        assert [(piece.kind, piece.outcome) for piece in trace.pieces] == [
            *(("due", "used"), ("speculative", "rolled back"), ("due", "used")),
        ]

    @pytest.mark.parametrize(
        ("graph", "found", "requests", "bound", "room", "started"),
        [
            (one_shot(topk=1), 1, 5, 1, 16, 1),
            (one_shot(topk=1), 1, 5, 3, 16, 3),
            (one_shot(topk=1), 1, 8, 16, 1, 1),
            (recomp(topk=3, each=True), 3, 1, 16, 2, 2),
        ],
        ids=["one", "three", "the engine's room", "after one search"],
    )
    async def test_no_more_is_speculated_on_than_may_be(
        self, graph: RAGraph, found: int, requests: int, bound: int, room: int, started: int
    ) -> None:
        """All searches have news at the same time: each admission counts for the next."""
        engine, search, load = SlowEngine(pause_s=0.01), PlayedSearch(*[range(1, 1 + found)] * 2), EngineLoad(room)
        async with played_server(engine, search, SpeculateGeneration(bound, odds=False), Split(), load=load) as server:
            compiled = graph.compile()
            runs = [asyncio.create_task(server.run(compiled, f"question {number}")) for number in range(requests)]
            await until(lambda: len(search.handles) == requests)
            search.next()
            await until(lambda: len(engine.sent) >= started)
            assert len(engine.sent) == server.wavefront.count("engine", speculative=True) == started
            search.next()
            traces = [result.trace for result in await asyncio.gather(*runs)]
        assert sum(trace.refused for trace in traces) == found * requests - started and load.pending == 0

    async def test_a_last_generation_is_no_refused_speculation(self, search: ContinuousIVF) -> None:
        """Nothing follows that could be searched for; there is no room either."""
        async with server_of(search, transformations=(SpeculateRetrieval(every=1),)) as server:
            server.measurements.speculative_embeddings = 1
            refused = [(await server.run(make().compile(), "why?")).trace.refused for make in (one_shot, hyde)]
        assert refused[0] == 0 < refused[1]

    async def test_nearest_results_are_speculated_on_first(self) -> None:
        engine, search = SlowEngine(pause_s=0.001), PlayedSearch([1], [1])
        async with played_server(engine, search, SpeculateGeneration(1, odds=False), Split()) as server:
            graph = one_shot(topk=1).compile()
            runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(3)]
            await until(lambda: len(search.handles) == 3)
            for handle, distance in zip(search.handles, (3.0, 1.0, 2.0), strict=True):
                handle.next(distance)
            await until(lambda: engine.sent)
            assert "question 1" in engine.sent[0].question.text
            search.next()
            await asyncio.gather(*runs)

    async def test_odds_decline_speculations_that_are_wrong(self) -> None:
        engine, graph, search = SlowEngine(pause_s=0.0005), one_shot(topk=1).compile(), PlayedSearch([1], [2])
        declined = 0
        async with played_server(engine, search, SpeculateGeneration(), Split()) as server:
            for number in range(12):
                run = asyncio.create_task(server.run(graph, f"question {number}"))
                await search.play(run, pause_s=0.0005)
                declined += run.result().trace.declined
        assert declined >= 1

    @pytest.mark.parametrize("error", [ConnectionError, asyncio.CancelledError])
    async def test_a_speculation_that_fails_is_sent_again(self, error: type[BaseException]) -> None:
        class Failing(SlowEngine):
            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                if len(self.sent) == 0:
                    self.sent.append(request)
                    raise error
                async for chunk in super().stream(request):
                    yield chunk

        engine, played = Failing(), PlayedSearch([1], [1])
        async with played_server(engine, played) as server:
            run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
            await played.play(run)
            assert run.result().text == long_answer(engine.sent[1]) and engine.sent[0] == engine.sent[1]

    async def test_vectors_that_cannot_be_subtracted_are_searched_ahead_of_need(self) -> None:
        """Such as a dense and a sparse one of the same text."""

        async def embed(query: str) -> dict[str, Any]:
            return {"dense": vector(query), "sparse": query}

        async def search(vector: dict[str, Any], k: int) -> list[str]:
            return [vector["sparse"]]

        # The last of the guess's queries is the whole guess, since texts are looked at every eight words.
        engine = SlowEngine(lambda request: " ".join(map(str, range(40))), pause_s=0.001)
        async with eager_server(engine, search, embed, None, transformations=[SpeculateRetrieval(every=1)]) as server:
            trace = (await server.run(hyde().compile(), "why?")).trace
        assert [piece.outcome for piece in speculative(trace, "search")] == ["rolled back"] * 4 + ["used"]

    async def test_a_function_that_fails_ahead_of_need_is_called_again(self) -> None:
        calls: list[str] = []

        async def search(query: str, k: int) -> list[str]:
            calls.append(query)
            if len(calls) == 1:
                raise InjectedError("a secret")
            return [query]

        async with eager_server(slow_planner(), search, None, None) as server:
            assert (await server.run(multistep(rounds=1).compile(), "why?")).state["docs"] == ("why?",)
        assert calls == ["why?"] * 2

    async def test_what_is_known_is_searched_for_together(self) -> None:
        """As soon as the plan is there, and the question itself before it: nothing else changes either."""
        lines = ("one?", "two?", "three?")
        engine = SlowEngine(lambda request: "\n".join(lines) if "Split" in request.question.text else "so.")
        began: list[str] = []
        answer = asyncio.Event()

        async def search(query: str, k: int) -> list[str]:
            began.append(query)
            await answer.wait()
            return [query]

        async with WorkflowServer(engine, search, None, None, PlainPrompts()) as server:
            run = asyncio.create_task(server.run(multistep().compile(), "why?"))
            await until(lambda: len(began) >= 4)
            answer.set()
            result = await run
        assert began[0] == "why?" and sorted(began) == sorted((*lines, "why?"))
        assert all(f"{line} so." in result.state["notes"] for line in lines)

    @pytest.mark.parametrize("make", [hyde, irg, one_shot], ids=lambda make: make.__name__)
    async def test_a_query_that_depends_on_what_runs_is_not_known(self, index: Any, make: Any) -> None:
        async with WorkflowServer(SlowEngine(), retriever(index), None, None, PlainPrompts(), extra_tokens=0) as server:
            trace = (await server.run(make().compile(), "why?")).trace
        assert {piece.kind for piece in trace.pieces} == {"due"}

    async def test_what_is_searched_for_in_vain_is_soon_left_alone(self) -> None:
        began: list[str] = []

        async def search(query: str, k: int) -> list[str]:
            began.append(query)
            return [query]

        graph = RAGraph("maybe").add_generation("think", prompt="{query}", output="thought")
        graph.add_retrieval("search", query="query").add_generation("answer", prompt="{docs} {thought}")
        graph.add_edge(START, "think").add_edge("search", "answer").add_edge("answer", END)
        graph.add_edge("think", lambda state: END if "fine" in state["thought"] else "search", to=(END, "search"))
        runnable = graph.compile(answer="thought")
        async with WorkflowServer(SlowEngine(lambda request: "fine"), search, None, None, PlainPrompts()) as server:
            traces = [(await server.run(runnable, f"question {number}")).trace for number in range(8)]
        assert began == ["question 0"] and traces[0].wasted_searches == 1
        assert all(trace.declined for trace in traces[1:]) and server.spending.searches.wasted == 1

    @staticmethod
    async def traced(
        search: ContinuousIVF, engine: SlowEngine, graph: CompiledGraph, parts: Any = None
    ) -> WorkflowTrace:
        """`parts`: search, embedder and documents of the server, if it does not search by vectors alone."""
        prompts = PlainPrompts()
        async with eager_server(engine, *(parts or (search, vector, document)), prompts) as server:
            trace: WorkflowTrace = (await server.run(graph, "why?")).trace
            await settled(server, engine, search, prompts)
        return trace


class TestBudget:
    """Wrong speculations take a share of what is taken stage by stage, from the first request on."""

    @pytest.mark.parametrize("extra_tokens", [0.0, 0.1, 0.25])
    def test_no_more_is_wasted(self, extra_tokens: float) -> None:
        """Speculating wherever there is room, in workflows of any structure whose provisional results are wrong."""
        over: list[float] = []

        async def serve() -> tuple[Any, list[WorkflowTrace]]:
            clock, speeds, traces = asyncio.get_running_loop().time, RandomSpeeds(0), []

            def ended(trace: WorkflowTrace) -> None:
                requests = server.spending.requests
                traces.append(trace)
                over.append(requests.wasted + requests.held - extra_tokens * requests.due)

            options = {"load": EngineLoad(16, clock=clock), "clock": clock, "extra_tokens": extra_tokens}
            async with eager_server(speeds.engine, speeds, speeds.embed, observer=ended, **options) as server:
                for seed in range(length(60, 30)):
                    flow = RandomFlow(seed)
                    runnable = flow.graph(speeds.pause).compile(answer=flow.answer)
                    await asyncio.gather(*(server.run(runnable, f"question {number}") for number in range(4)))
            return server.spending, traces

        spending, traces = run_virtual(serve())
        tokens, requests, searches = spending.tokens, spending.requests, spending.searches
        assert tokens.held == requests.held == searches.held == 0
        # What is known is not held: a condition may lead elsewhere.
        assert searches.wasted <= extra_tokens * searches.due + 16
        assert tokens.wasted <= extra_tokens * tokens.due
        assert max(over) <= 0 and requests.due > length(300, 150) and bool(requests.wasted) is bool(extra_tokens)
        assert sum(trace.wasted_tokens for trace in traces) == tokens.wasted

    async def test_tokens_of_a_speculation_are_those_that_the_engine_has_made(self) -> None:
        engine, search = SlowEngine(pause_s=0.001), PlayedSearch([1], [2])
        async with played_server(engine, search) as server:
            run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
            await search.play(run, pause_s=0.003)
            trace = run.result().trace
        due, (wrong,) = trace.pieces[-1], speculative(trace, "engine")
        assert wrong.outcome == "rolled back" and wrong.prompt_tokens == due.prompt_tokens
        assert trace.wasted_tokens == wrong.prompt_tokens + wrong.tokens == server.spending.tokens.wasted
        assert server.spending.tokens.due == due.prompt_tokens + due.tokens


class TestGains:
    """Each transformation is applied where its estimate is positive, and pieces say so."""

    @pytest.mark.parametrize(("search_s", "split"), [(None, True), (1.0, True), (1e-5, False)])
    async def test_short_searches_stay_whole(self, search: ContinuousIVF, search_s: float | None, split: bool) -> None:
        search.budget = Budget(1e-4)
        async with server_of(search, transformations=(Split(),)) as server:
            server.measurements.search_s.value = search_s
            trace = (await server.run(one_shot().compile(), "why?")).trace
        assert ("split" in trace.pieces[0].applied) is split

    async def test_a_first_request_that_finds_nothing_cached_does_not_end_ordering(self, search: ContinuousIVF) -> None:
        now_s = [0.0]
        load = EngineLoad(4, clock=lambda: now_s[0])
        async with server_of(search, transformations=(OrderDocuments(),), load=load) as server:
            for seconds, applied in ((1.0, ["order_documents"]), (1.0, ["order_documents"]), (0.0, [])):
                for _ in range(1 if seconds else 200):
                    with load.prefilling() as started:
                        now_s[0] += seconds
                        started()
                trace = (await server.run(one_shot().compile(), "why?")).trace
                assert trace.pieces[-1].applied == applied
                assert server.measurements.cached_share.value == 0.0

    @pytest.mark.parametrize(
        ("right", "others", "wasted", "pays"),
        [
            *((0.9, 0, 0, True), (0.9, 8, 0, True), (0.3, 0, 0, True), (0.3, 8, 0, False)),
            *((0.9, 0, 8, True), (0.3, 0, 2, True), (0.3, 0, 4, False)),
        ],
    )
    async def test_a_wrong_generation_counts_for_all_that_are_on_the_engine_and_in_the_budget(
        self, right: float, others: int, wasted: int, pays: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tenth of a second is left of the search, and a prefill takes half of that; ten may be wasted."""
        seen: list[WorkItem] = []

        class Watching(Split):
            def apply(self, wavefront: Any, facts: Any, /) -> None:
                seen.extend(wavefront.new)

        now_s, search = [0.0], PlayedSearch([1], [1])
        load = EngineLoad(16, clock=lambda: now_s[0])
        async with played_server(SlowEngine(), search, Watching(), load=load, extra_tokens=0.25) as server:
            run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
            await until(lambda: seen)
            for _ in range(40):
                server.spending.generated(100)
            for _ in range(wasted):
                server.spending.waste_generation(100)
            (item,), measured = seen, server.measurements
            item.stage = Stage(1, 2, np.array([[1]]), np.ones((1, 1), np.float32))
            ahead = WorkItem(item.request, item.run, WorkItemTrace("answer", "speculative", "engine"), after=item)
            assert SpeculateGeneration().gain_s(ahead, measured) > 0
            with load.prefilling() as started:
                now_s[0] += 0.05
                started()
            for number in range(10):
                measured.odds(item).learn([(number < 10 * right, 0.1)], [item.part])
            monkeypatch.setattr(server.wavefront, "count", lambda *_, **__: others)
            assert (SpeculateGeneration().gain_s(ahead, measured) > 0) is pays
            run.cancel()
            await asyncio.wait((run,))
