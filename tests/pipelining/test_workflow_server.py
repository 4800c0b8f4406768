"""A server of workflows answers as the plain interpreter does, whatever it speculates on and whatever fails."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from itertools import count, islice
from random import Random
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples, length
from support.waiting import turns, until

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.structured_flows import RandomFlow, RandomSpeeds, Reference
from support.workflow_server import (
    SMALL_PIECES,
    InjectedError,
    N,
    PlayedSearch,
    SlowEngine,
    broken,
    document,
    eager,
    eager_server,
    interpreted,
    long_answer,
    outcome,
    played_server,
    retriever,
    server_of,
    settled,
    small_index,
    vector,
)
from support.workflows import Asked, PlainPrompts, ScriptedEngine, chain, compiled, graphs

from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.pipelining import AnswerChunk, ContinuousIVF, EngineLoad, QueueFullError, Stage, StagedIVF, WarmUp
from ragorder.pipelining.search import Budget, History
from ragorder.pipelining.workflow import (
    END,
    START,
    CompiledGraph,
    NodeError,
    RAGraph,
    WorkflowResult,
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
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
    WarmSystemPrompt,
    all_transformations,
)
from ragorder.pipelining.workflow.wavefront import WorkItem


@pytest.fixture(scope="module")
def index() -> Any:
    return small_index()


@pytest.fixture
def search(index: Any) -> Iterator[ContinuousIVF]:
    """One cluster a piece."""
    with ContinuousIVF(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
        yield search


SEARCHES = ("shared", "stages", "function of a vector", "function of a text", "function in a thread")


def slow_planner() -> SlowEngine:
    """An engine whose plans have one short line and a long one."""
    return SlowEngine(lambda request: "first line\n" + "word " * 40, pause_s=0.001)


async def same(query: str) -> Any:
    return vector("same")


def speculative(trace: WorkflowTrace, worker: str) -> list[Any]:
    found = [piece for piece in trace.pieces if piece.kind == "speculative" and piece.worker == worker]
    assert found
    return found


def search_of(kind: str, index: Any, shared: ContinuousIVF) -> tuple[Any, Any, Any]:
    """Search, embedder and documents of a server."""

    async def ids(vector: Any, k: int) -> Any:
        await asyncio.sleep(0)
        return index.search(vector[None], k)[1][0]

    if kind == "function of a text":
        return retriever(index), None, None
    search = {
        "shared": shared,
        "stages": StagedIVF(index),
        "function of a vector": ids,
        "function in a thread": lambda vector, k: index.search(vector[None], k)[1][0],
    }[kind]
    return search, vector, document


async def served(
    flow: RandomFlow, speeds: RandomSpeeds, transformations: Any, *, whole: bool = False
) -> WorkflowResult:
    """`whole`: searched by a function of a text."""
    prompts, clock = PlainPrompts(), asyncio.get_running_loop().time
    search = (speeds.found, None, None) if whole else (speeds, speeds.embed, document)
    options: dict[str, Any] = {"load": EngineLoad(16, clock=clock), "clock": clock}
    async with eager_server(speeds.engine, *search, prompts, transformations=transformations, **options) as server:
        result = await server.run(flow.graph(speeds.pause).compile(answer=flow.answer), "which?")
    assert prompts.open == 0
    return result


class TestAnswers:
    @pytest.mark.parametrize("kind", SEARCHES)
    @pytest.mark.parametrize("make", [one_shot, multistep, irg, hyde, recomp], ids=lambda make: make.__name__)
    async def test_the_papers_workflows(self, index: Any, search: ContinuousIVF, make: Any, kind: str) -> None:
        engine, prompts, graph = SlowEngine(), PlainPrompts(), make().compile()
        expected = await interpreted(graph, index, "why?")
        for transformations in (None, (), eager()) if kind == "shared" else (eager(),):
            parts = *search_of(kind, index, search), prompts
            async with eager_server(engine, *parts, transformations=transformations) as server:
                for result in await asyncio.gather(*(server.run(graph, "why?") for _ in range(3))):
                    assert (result.text, dict(result.state)) == (expected.text, dict(expected.state))
                await settled(server, engine, search, prompts)

    @settings(max_examples=examples(150))
    @given(graphs(), st.integers(0, 2**32), st.booleans(), st.none() | st.integers(1, 2), st.sampled_from(SEARCHES))
    async def test_on_any_graph_they_are_the_interpreters(
        self, index: Any, graph: RAGraph, seed: int, odds: bool, max_generations: int | None, kind: str
    ) -> None:
        """Loops, conditions, branches that meet; requests side by side that are at different places."""
        runnable = compiled(graph)
        if runnable is None:
            return
        engine, prompts = SlowEngine(), PlainPrompts()
        questions = [f"question {Random(seed).randrange(3)}" for _ in range(3)]
        expected = [await outcome(interpreted(runnable, index, question)) for question in questions]
        with ContinuousIVF(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
            options = {"transformations": None if odds else eager(), "max_generations": max_generations}
            async with eager_server(engine, *search_of(kind, index, search), prompts, **options) as server:
                runs = (outcome(server.run(runnable, question, on_limit="raise")) for question in questions)
                assert await asyncio.gather(*runs) == expected
                await settled(server, engine, search, prompts)

    def test_each_node_runs_once_when_all_that_lead_to_it_have_ended(self) -> None:
        """Forks, choices and loops in each other, one beside another branch, whatever anything takes, by recursion
        over their structure."""
        ahead, flows = 0, filter(lambda flow: flow.loops_in_branches, map(RandomFlow, count()))
        for flow in islice(flows, length(10_000, 250)):
            expected = Reference(flow, "which?")
            for transformations, whole in (((), False), (eager(), False), (eager(), True)):
                result = run_virtual(served(flow, RandomSpeeds(flow.seed), transformations, whole=whole))
                assert result.trace.rounds == expected.runs, f"seed {flow.seed}"
                assert dict(result.state) == expected.values, f"seed {flow.seed}"
                ahead += sum(piece.kind != "due" and piece.outcome == "used" for piece in result.trace.pieces)
        assert ahead > length(100, 20)

    async def test_texts_are_ids_where_documents_are_fetched_by_them(self) -> None:
        async def keys(query: str, k: int) -> list[str]:
            return [f"{query[:3]}-{rank}" for rank in range(k)]

        async with WorkflowServer(SlowEngine(), keys, None, str.upper, PlainPrompts()) as server:
            result = await server.run(one_shot(topk=2).compile(), "why?")
        assert result.state["docs"] == ("WHY-0", "WHY-1")

    @pytest.mark.parametrize(
        ("search", "embed", "found", "message"),
        [
            (PlayedSearch([1]), None, document, "embed is None: give it, since PlayedSearch takes vectors for ids"),
            (PlayedSearch([1]), vector, None, "document is None: give it, since PlayedSearch takes vectors for ids"),
            ("index", vector, document, "search must be an index's search or a function, got str"),
        ],
    )
    def test_a_search_that_cannot_serve_is_refused(self, search: Any, embed: Any, found: Any, message: str) -> None:
        with pytest.raises((TypeError, ValueError), match=message):
            WorkflowServer(SlowEngine(), search, embed, found, PlainPrompts())

    @pytest.mark.parametrize("found", [None, "one text", 7])
    async def test_a_function_that_returns_no_documents_says_so(self, found: Any) -> None:
        async def search(query: str, k: int) -> Any:
            return found

        async with WorkflowServer(SlowEngine(), search, None, None, PlainPrompts()) as server:
            with pytest.raises(NodeError, match="without `document` returns documents, best first, got"):
                await server.run(one_shot().compile(), "why?")

    @pytest.mark.parametrize("flat", [True, False])
    async def test_a_search_that_returns_no_ids_of_one_query_says_so(self, index: Any, flat: bool) -> None:
        """FAISS returns distances, too: they must not be taken for ids."""

        def found(vector: Any, k: int) -> Any:
            distances, ids = index.search(vector[None], k)
            return distances[0] if flat else (distances, ids)

        says = "a search function returns the ids of one query, best first, got float"
        for search, message in ((found, says), (index, "IndexIVFFlat.search gives no stages")):
            async with WorkflowServer(SlowEngine(), search, vector, document, PlainPrompts()) as server:
                with pytest.raises(NodeError, match=f"node 'search': {message}"):
                    await server.run(one_shot().compile(), "why?")

    async def test_documents_stay_in_rank_order_unless_ordering_pays(self, search: ContinuousIVF) -> None:
        engine, graph = SlowEngine(), one_shot().compile()
        for chosen, ordered in (((), False), ((OrderDocuments(),), True)):
            async with server_of(search, engine, transformations=chosen) as server:
                await server.run(graph, "why?")
            assert engine.sent[-1].question.ordered is ordered


class TestSpeculation:
    async def test_a_search_whose_query_is_written_early_is_used(self, search: ContinuousIVF) -> None:
        """The first line of a plan is the first query: its search has begun before the plan ends."""
        trace = await self.traced(search, slow_planner(), multistep(rounds=2).compile())
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
            search, engine, graph.compile(answer="text"), embed=same if node == "answer" else vector
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

    async def test_a_search_by_a_function_begins_as_soon_as_its_query_is_written(self) -> None:
        engine, began = slow_planner(), list[tuple[str, int]]()

        async def search(query: str, k: int) -> list[str]:
            began.append((query, engine.running))
            await asyncio.sleep(0)
            return [query]

        async with eager_server(engine, search, None, None) as server:
            trace = (await server.run(multistep(rounds=2).compile(), "why?")).trace
        assert ("first line", 1) in began and speculative(trace, "search")[0].outcome == "used"

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
        search: ContinuousIVF, engine: SlowEngine, graph: CompiledGraph, embed: Any = vector
    ) -> WorkflowTrace:
        prompts = PlainPrompts()
        async with eager_server(engine, search, embed, document, prompts) as server:
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

    async def test_a_stream_raises_what_a_run_raises(self, search: ContinuousIVF) -> None:
        async with (
            WorkflowServer(SlowEngine(), search, broken, document, PlainPrompts()) as server,
            server.stream(one_shot().compile(), "why?") as stream,
        ):
            with pytest.raises(NodeError, match="workflow 'one_shot', node 'search': InjectedError"):
                await anext(stream)

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
    async def test_a_batch_waits_for_its_turn_at_a_full_queue(self, search: ContinuousIVF, max_waiting: int) -> None:
        """Two batches at once, and requests that fill the queue: none of a batch is refused, all begin in order."""
        graph, engine = one_shot().compile(), SlowEngine(pause_s=0.001)
        async with server_of(search, engine, transformations=(), max_requests=2, max_waiting=max_waiting) as server:

            async def batch(name: str) -> dict[int, Any]:
                questions = (f"{name} {number}" for number in range(10))
                return {number: result async for number, result in server.batch(graph, questions)}

            runs = [asyncio.create_task(server.run(graph, f"single {number}")) for number in range(2 + max_waiting)]
            await asyncio.sleep(0)
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

    async def test_takes_as_many_as_it_may_and_refuses_the_rest(self, search: ContinuousIVF) -> None:
        graph = one_shot().compile()
        async with server_of(search, SlowEngine(pause_s=0.001), max_requests=2, max_waiting=3) as server:
            runs = [server.run(graph, f"question {number}") for number in range(7)]
            done = await asyncio.gather(*runs, return_exceptions=True)
        assert Counter(map(type, done)) == {QueueFullError: 2, WorkflowResult: 5}

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
    async def test_a_node_that_fails_ends_its_own_request(self, search: ContinuousIVF, index: Any, part: str) -> None:
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
            await settled(server, engine, search, prompts)

    async def test_a_node_that_waits_for_something_cancelled_ends_its_request(self, search: ContinuousIVF) -> None:
        async def step(state: Any) -> dict[str, Any]:
            task = asyncio.create_task(asyncio.sleep(3600))
            task.cancel()
            await task
            return {}

        graph = RAGraph("broken").add_step("step", step).add_generation("answer", prompt="{query}")
        engine, prompts = SlowEngine(), PlainPrompts()
        async with server_of(search, engine, prompts) as server:
            with pytest.raises(NodeError, match="workflow 'broken', node 'step': CancelledError"):
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

        graph = irg().compile()
        async with server_of(search, transformations=(Broken(), *eager()), observer=broken) as server:
            result = await server.run(graph, "why?")
        assert result.text == (await interpreted(graph, index, "why?")).text
        assert [record.message for record in caplog.records] == [
            "broken failed: InjectedError; later failures are not logged",
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


class TestMemory:
    """A request asks nothing twice: neither the engine for the same question and documents, nor the same search."""

    @staticmethod
    async def rounds(
        graph: RAGraph, *transformations: Any, **options: Any
    ) -> tuple[WorkflowResult, list[Asked], list[str]]:
        """Every search finds the same documents."""
        engine, prompts, embedded = SlowEngine(), PlainPrompts(), list[str]()

        async def embed(query: str) -> Any:
            embedded.append(query)
            return vector("the same")

        async def nearest(_: Any, k: int) -> Any:
            return range(k)

        async with eager_server(
            engine, nearest, embed, document, prompts, transformations=transformations, **options
        ) as server:
            result = await server.run(graph.compile(), "why?")
        assert prompts.open == 0 and prompts.confirmed == len(engine.sent)
        expected = await interpret(
            graph.compile(),
            "why?",
            engine=ScriptedEngine(long_answer),
            prompts=PlainPrompts(),
            retrieve=lambda _, topk: asyncio.sleep(0, [document(id) for id in range(topk)]),
        )
        assert dict(result.state) == dict(expected.state)
        return result, engine.sent, embedded

    async def test_a_round_that_finds_the_same_is_not_generated_again(self) -> None:
        result, sent, embedded = await self.rounds(irg(rounds=4))
        assert len(sent) == 1 and embedded == ["why?", f"why? {result.text}"]
        due = [(piece.node, piece.from_memory) for piece in result.trace.pieces if piece.worker != "step"]
        new, known = [("search", False), ("answer", True)], [("search", True), ("answer", True)]
        assert due == [("search", False), ("answer", False), *new, *known, *known]

    @pytest.mark.parametrize(
        ("memo", "temperature", "sent"),
        [(None, 0.0, 1), (None, 0.7, 3), (None, None, 3), (True, 0.7, 1), (False, 0.0, 3)],
    )
    async def test_answers_are_kept_at_temperature_0_or_as_the_server_says(
        self, memo: bool | None, temperature: float | None, sent: int
    ) -> None:
        graph = RAGraph("rounds", max_rounds=3).add_generation("answer", prompt="{query}", temperature=temperature)
        graph.add_step("count", lambda state: {"round": state.get("round", 0) + 1}, writes="round")
        graph.add_edge(START, "answer").add_edge("answer", "count")
        graph.add_edge("count", lambda state: "answer" if state["round"] < 3 else END, to=("answer", END))
        assert len((await self.rounds(graph, memo=memo))[1]) == sent

    async def test_another_limit_option_or_document_is_asked(self) -> None:
        graph = RAGraph("three").add_retrieval("search", query="query", topk=2)
        graph.add_retrieval("more", query="query", topk=3, output="others")
        asked: list[dict[str, Any]] = [{}, {"max_tokens": 7}, {"stop": ["."]}, {"documents": "others"}]
        for id, options in zip("abcd", asked, strict=True):
            graph.add_generation(id, prompt="{query}", output=id, **{"documents": "docs"} | options)
        _, sent, embedded = await self.rounds(chain(graph, "search", "more", *"abcd"))
        assert len(sent) == 4 and embedded == ["why?", "why?"]

    async def test_branches_share_what_is_still_being_answered(self) -> None:
        graph = RAGraph("beside").add_retrieval("one", query="query", output="first")
        graph.add_retrieval("other", query="query", output="second")
        graph.add_generation("a", prompt="{query}", documents="first", output="left")
        graph.add_generation("b", prompt="{query}", documents="second", output="right")
        graph.add_generation("answer", prompt="{left} {right}")
        chain(graph, "one", "a", "answer").add_edge(START, "other").add_edge("other", "b").add_edge("b", "answer")
        _, sent, embedded = await self.rounds(graph, max_generations=1)
        assert len(sent) == 2 and embedded == ["why?"]

    async def test_an_answer_from_memory_is_streamed(self, search: ContinuousIVF) -> None:
        graph = RAGraph("again").add_generation("guess", prompt="{query}", output="guess")
        graph = chain(graph.add_generation("answer", prompt="{query}"), "guess", "answer")
        engine = SlowEngine()
        async with server_of(search, engine) as server, server.stream(graph.compile(), "why?") as stream:
            pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.result.text == stream.result.state["guess"] and len(engine.sent) == 1

    async def test_nothing_is_speculated_on_what_is_known(self) -> None:
        search, engine = PlayedSearch([1], [1], [1]), SlowEngine(pause_s=0.001)
        async with played_server(
            engine, search, SpeculateGeneration(odds=False), SpeculateRetrieval(every=1, embeddings=8), Split()
        ) as server:
            run = asyncio.create_task(server.run(irg(topk=1, rounds=3).compile(), "why?"))
            await search.play(run, pause_s=0.001)
        assert len(engine.sent) == 1 and any(piece.kind == "speculative" for piece in run.result().trace.pieces)

    async def test_other_requests_ask_themselves(self) -> None:
        search, engine = PlayedSearch([1]), SlowEngine()
        async with played_server(engine, search, Split()) as server:
            for _ in range(2):
                await search.play(asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?")))
        assert len(engine.sent) == len(search.handles) == 2


class TestUntil:
    """A request for documents ends with them."""

    @staticmethod
    async def ended(graph: RAGraph, name: str, transformations: Any = ()) -> tuple[Any, list[Asked]]:
        engine = SlowEngine(lambda asked: "One?\nTwo?" if not asked.documents else long_answer(asked))
        prompts = PlainPrompts()
        with ContinuousIVF(small_index(), cores=1, budget=Budget(SMALL_PIECES)) as search:
            async with server_of(search, engine, prompts, transformations, load=EngineLoad(16)) as server:
                whole = await server.run(graph.compile(), "why?")
                engine.sent.clear()
                ended = await server.run(graph.compile(), "why?", until=name)
                assert ended.state[name] == whole.state[name]
                await settled(server, engine, search, prompts)
        return ended, engine.sent

    @pytest.mark.parametrize("transformations", [(), eager()])
    @pytest.mark.parametrize(("make", "before"), [(one_shot, 0), (hyde, 1), (recomp, 0), (multistep, 3), (irg, 2)])
    async def test_the_last_answer_is_not_generated(self, make: Any, before: int, transformations: Any) -> None:
        """Those that lead to another search are: multistep's plan, and all but the last in rounds."""
        result, sent = await self.ended(make(), "docs", transformations)
        engine = [piece for piece in result.trace.pieces if piece.worker == "engine"]
        assert sum(piece.kind == "due" for piece in engine) == before and result.trace.outcome == "answered"
        assert len(sent) <= len(engine)
        if not transformations:
            assert len(sent) == before
            assert result.text == (result.state["answer"] if make in (multistep, irg) else "")

    async def test_a_step_after_the_last_search_runs_if_it_writes_the_documents(self) -> None:
        graph = RAGraph("reranked").add_retrieval("search", query="query", topk=3)
        graph.add_step("rerank", lambda state: {"docs": state["docs"][::-1]}, reads="docs", writes="docs")
        graph.add_generation("answer", prompt="{query} {docs}")
        assert (await self.ended(chain(graph, "search", "rerank", "answer"), "docs"))[1] == []

    async def test_an_answer_that_decides_on_another_search_is_generated(self) -> None:
        graph = RAGraph("decides", max_rounds=3).add_retrieval("search", query="query")
        graph.add_generation("answer", prompt="{query} {docs}").add_edge(START, "search").add_edge("search", "answer")
        graph.add_edge("answer", lambda state: END if state.get("answer", "") else "search", to=("search", END))
        result, sent = await self.ended(graph, "docs")
        assert len(sent) == 1 and result.text == result.state["answer"]

    async def test_branches_that_do_not_lead_to_it_do_not_run(self) -> None:
        graph = RAGraph("beside").add_retrieval("search", query="query")
        graph.add_generation("guess", prompt="{query}", output="guess")
        graph.add_generation("answer", prompt="{guess} {docs}")
        chain(graph, "search", "answer").add_edge(START, "guess").add_edge("guess", "answer")
        assert (await self.ended(graph, "docs"))[1] == []


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
        ("make", "says"),
        [
            (lambda: SpeculateGeneration(0), "at least 1"),
            (lambda: SpeculateRetrieval(0), "at least 1"),
            (lambda: SpeculateRetrieval(every=0), "at least 1"),
            (lambda: SpeculateRetrieval(embeddings=0), "at least 1"),
            (lambda: server_of(PlayedSearch([1]), max_requests=0), "limit must be at least 1"),
            (
                lambda: server_of(PlayedSearch([1]), extra_tokens=-1),
                "extra_tokens must be at least 0, a share, or None",
            ),
        ],
    )
    def test_wrong_settings(self, make: Any, says: str) -> None:
        with pytest.raises(ValueError, match=says):
            make()

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
