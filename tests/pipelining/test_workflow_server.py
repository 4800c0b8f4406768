"""A server of workflows answers as the plain interpreter does, whatever it speculates on and whatever fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from contextvars import ContextVar
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rings import examples, length

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
    interpreted,
    long_answer,
    outcome,
    played_server,
    retriever,
    settled,
    small_index,
    vector,
)
from support.workflows import Asked, PlainPrompts, ScriptedEngine, compiled, graphs

from ragorder.eval.virtual.loop import run_virtual
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
    async with WorkflowServer(
        speeds.engine,
        *((speeds.found, None, None) if whole else (speeds, speeds.embed, document)),
        prompts,
        transformations=transformations,
        load=EngineLoad(16, clock=clock),
        clock=clock,
    ) as server:
        result = await server.run(flow.graph(speeds.pause).compile(answer=flow.answer), "which?")
    assert prompts.open == 0
    return result


class TestAnswers:
    @pytest.mark.parametrize("make", [one_shot, multistep, irg, hyde, recomp], ids=lambda make: make.__name__)
    @pytest.mark.parametrize("transformations", [None, (), "eager"])
    async def test_the_papers_workflows(
        self, index: Any, search: ContinuousIVF, make: Any, transformations: Any
    ) -> None:
        engine, prompts, graph = SlowEngine(), PlainPrompts(), make().compile()
        chosen = eager() if transformations == "eager" else transformations
        expected = await interpret(graph, "why?", engine=engine, prompts=prompts, retrieve=retriever(index))
        async with WorkflowServer(
            engine, search, vector, document, prompts, transformations=chosen, load=EngineLoad(16)
        ) as server:
            results = await asyncio.gather(*(server.run(graph, "why?") for _ in range(3)))
            assert [result.text for result in results] == [expected.text] * 3
            assert [dict(result.state) for result in results] == [dict(expected.state)] * 3
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
            chosen = None if odds else eager()
            async with WorkflowServer(
                engine,
                *search_of(kind, index, search),
                prompts,
                transformations=chosen,
                load=EngineLoad(16),
                max_generations=max_generations,
            ) as server:
                runs = (outcome(server.run(runnable, question, on_limit="raise")) for question in questions)
                assert await asyncio.gather(*runs) == expected
                await settled(server, engine, search, prompts)

    def test_each_node_runs_once_when_all_that_lead_to_it_have_ended(self) -> None:
        """Forks, choices and loops in each other, whatever anything takes, by recursion over their structure."""
        ahead = in_branches = 0
        for seed in range(length(3000, 1000)):
            flow = RandomFlow(seed)
            expected = Reference(flow, "which?")
            in_branches += flow.loops_in_branches
            for transformations, whole in (((), False), (eager(), False), (eager(), True)):
                result = run_virtual(served(flow, RandomSpeeds(seed), transformations, whole=whole))
                assert result.trace.rounds == expected.runs, f"seed {seed}"
                assert dict(result.state) == expected.values, f"seed {seed}"
                ahead += sum(piece.kind != "due" and piece.outcome == "used" for piece in result.trace.pieces)
        assert in_branches > 100 and ahead > 100

    @pytest.mark.parametrize("kind", SEARCHES)
    @pytest.mark.parametrize("make", [multistep, irg, hyde], ids=lambda make: make.__name__)
    async def test_any_search_serves(self, index: Any, search: ContinuousIVF, make: Any, kind: str) -> None:
        engine, prompts, graph = SlowEngine(), PlainPrompts(), make().compile()
        expected = await interpreted(graph, index, "why?")
        async with WorkflowServer(
            engine, *search_of(kind, index, search), prompts, transformations=eager(), load=EngineLoad(16)
        ) as server:
            results = await asyncio.gather(*(server.run(graph, "why?") for _ in range(2)))
            assert [dict(result.state) for result in results] == [dict(expected.state)] * 2
            await settled(server, engine, search, prompts)

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
            async with WorkflowServer(
                engine, search, vector, document, PlainPrompts(), transformations=chosen
            ) as server:
                await server.run(graph, "why?")
            assert engine.sent[-1].question.ordered is ordered


class TestSpeculation:
    async def test_a_search_whose_query_is_written_early_is_used(self, search: ContinuousIVF) -> None:
        """The first line of a plan is the first query: its search has begun before the plan ends."""
        engine = SlowEngine(lambda request: "first line\n" + "word " * 40, pause_s=0.001)
        trace = await self.traced(search, engine, multistep(rounds=2).compile())
        found = [piece for piece in trace.pieces if piece.kind == "speculative" and piece.worker == "search"]
        assert found[0].outcome == "used"
        plan, first = (
            trace.pieces[0],
            next(piece for piece in trace.pieces if piece.node == "search" and piece not in found),
        )
        assert found[0].started_s < plan.ended_s <= first.started_s

    async def test_a_search_ahead_of_need_that_fails_is_searched_again(self, index: Any) -> None:
        class Failing(ContinuousIVF):
            def submit(self, *args: Any, due: bool = True, **options: Any) -> Any:
                handle = super().submit(*args, due=due, **options)
                if not due:
                    handle.fail(InjectedError("a secret"))
                return handle

        engine = SlowEngine(lambda request: "first line\n" + "word " * 40, pause_s=0.001)
        with Failing(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
            trace = await self.traced(search, engine, multistep(rounds=2).compile())
        assert trace.outcome == "answered"
        found = [piece for piece in trace.pieces if piece.kind == "speculative" and piece.worker == "search"]
        assert found and found[0].outcome == "rolled back"

    async def test_a_query_that_changes_is_searched_again(self, index: Any, search: ContinuousIVF) -> None:
        engine = SlowEngine(lambda request: " ".join(f"word{number}" for number in range(41)), pause_s=0.001)
        graph = hyde().compile()
        trace = await self.traced(search, engine, graph)
        found = [piece for piece in trace.pieces if piece.kind == "speculative" and piece.worker == "search"]
        assert found and {piece.outcome for piece in found} == {"rolled back"}
        assert engine.sent[-1].documents == tuple(await retriever(index)(" ".join(f"word{n}" for n in range(41)), 5))

    @pytest.mark.parametrize("across", [True, False])
    async def test_a_generation_begins_on_what_a_search_ahead_of_need_has_found(
        self, index: Any, search: ContinuousIVF, across: bool
    ) -> None:
        """Whatever is guessed, the same documents are found, and the answer's prompt shows these alone."""
        engine, prompts, graph = SlowEngine(pause_s=0.002), PlainPrompts(), hyde().compile()

        async def embed(query: str) -> Any:
            return vector("same")

        async def retrieve(query: str, topk: int) -> Any:
            return await retriever(index)("same", topk)

        expected = await interpret(
            graph, "why?", engine=ScriptedEngine(long_answer), prompts=prompts, retrieve=retrieve
        )
        chosen = (SpeculateGeneration(odds=False, across=across), *eager()[1:])
        async with WorkflowServer(engine, search, embed, document, prompts, transformations=chosen) as server:
            result = await server.run(graph, "why?")
            await settled(server, engine, search, prompts)
        assert result.text == expected.text
        pieces = result.trace.pieces
        ahead = [piece for piece in pieces if piece.kind == "speculative" and piece.worker == "engine"]
        used = [piece for piece in ahead if piece.outcome == "used"]
        assert pieces[0].node == "guess" and len(used) <= 1
        if across:
            assert used and used[0].started_s < pieces[0].ended_s
        assert across or all(piece.started_s >= pieces[0].ended_s for piece in ahead)

    async def test_what_is_two_stages_ahead_is_dropped_with_its_branch(self, search: ContinuousIVF) -> None:
        """Half the text would lead to a search and an answer, the whole leads to the end."""
        words = [f"word{number}" for number in range(30)]
        graph = RAGraph("turns")
        graph.add_generation("think", prompt="{query}", output="text")
        graph.add_retrieval("search", query="text")
        graph.add_generation("answer", prompt="{docs} {query}")
        graph.add_edge(START, "think").add_edge("search", "answer").add_edge("answer", END)
        graph.add_edge("think", lambda state: END if words[-1] in state["text"] else "search", to=("search", END))

        async def embed(query: str) -> Any:
            return vector("same")

        engine, prompts = SlowEngine(lambda request: " ".join(words), pause_s=0.002), PlainPrompts()
        async with WorkflowServer(engine, search, embed, document, prompts, transformations=eager()) as server:
            trace = (await server.run(graph.compile(answer="text"), "why?")).trace
            await settled(server, engine, search, prompts)
        ahead = [piece for piece in trace.pieces if piece.node == "answer"]
        assert ahead and ahead[-1].outcome == "wasted" and "used" not in {piece.outcome for piece in ahead}

    async def test_a_prompt_that_shows_the_answer_before_it_is_not_tried_for_long(self, index: Any) -> None:
        """The second round's notes hold the first answer: what is generated beside that is never right."""
        generations = SpeculateGeneration()
        predicted = SpeculateRetrieval(generations=generations, known=False)
        beside: list[int] = []
        with ContinuousIVF(index, cores=1, budget=Budget(SMALL_PIECES)) as search:
            async with WorkflowServer(
                SlowEngine(pause_s=0.004),
                search,
                vector,
                document,
                PlainPrompts(),
                transformations=(generations, predicted, *all_transformations()[2:]),
                extra_tokens=None,
            ) as server:
                for number in range(12):
                    plan, *others = (await server.run(multistep(rounds=2).compile(), f"question {number}")).trace.pieces
                    wrong = [each for each in others if each.stages_ahead == 2 and each.started_s > plan.ended_s]
                    beside.append(sum(each.worker == "engine" for each in wrong))
        assert not any(beside[-4:])

    async def test_a_branch_that_is_not_taken_leaves_nothing(self, search: ContinuousIVF) -> None:
        """Half the text would lead to a search, the whole does not."""
        words = [f"word{number}" for number in range(30)]
        graph = RAGraph("turns")
        graph.add_generation("think", prompt="{query}", output="text")
        graph.add_retrieval("search", query="text")
        graph.add_generation("answer", prompt="{docs} {query}")
        graph.add_edge(START, "think").add_edge("search", "answer").add_edge("answer", END)
        graph.add_edge("think", lambda state: END if words[-1] in state["text"] else "search", to=("search", END))
        trace = await self.traced(
            search, SlowEngine(lambda request: " ".join(words), pause_s=0.001), graph.compile(answer="text")
        )
        found = [piece for piece in trace.pieces if piece.worker == "search"]
        assert found and found[-1].outcome == "wasted" and all(piece.kind == "speculative" for piece in found)

    async def test_a_generation_that_is_not_taken_leaves_nothing(self) -> None:
        """Provisional documents would lead to an answer, the final ones end the request."""
        graph = RAGraph("turns").add_retrieval("search", query="query", topk=1)
        graph.add_generation("answer", prompt="{docs}")
        graph.add_edge(START, "search").add_edge("answer", END)
        graph.add_edge("search", lambda state: "answer" if "document 1" in state["docs"] else END, to=("answer", END))
        engine, search = SlowEngine(pause_s=0.001), PlayedSearch([1], [2])
        async with played_server(engine, search) as server:
            run = asyncio.create_task(server.run(graph.compile(answer="docs"), "why?"))
            while not search.handles:
                await asyncio.sleep(0)
            search.next()
            while not engine.running:
                await asyncio.sleep(0)
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
            for _ in range(100):
                await asyncio.sleep(0)
            # The engine is not done yet.
            assert not run.done()
            engine.aborted.set()
            trace = (await run).trace
        assert [(piece.kind, piece.outcome) for piece in trace.pieces] == [
            ("due", "used"),
            ("speculative", "rolled back"),
            ("due", "used"),
        ]

    async def test_the_bound_counts_all_generations(self) -> None:
        engine = SlowEngine(pause_s=0.001)
        for bound, started in ((1, 1), (3, 3)):
            search = PlayedSearch([1], [1])
            async with played_server(engine, search, SpeculateGeneration(bound, odds=False), Split()) as server:
                graph = one_shot(topk=1).compile()
                runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(5)]
                while len(search.handles) < 5:
                    await asyncio.sleep(0)
                search.next()
                for _ in range(10):
                    await asyncio.sleep(0)
                assert server.wavefront.count("engine", speculative=True) == started
                search.next()
                traces = [result.trace for result in await asyncio.gather(*runs)]
                assert sum(trace.refused for trace in traces) == 5 - started

    async def test_what_a_cycle_admits_is_counted_before_it_begins(self) -> None:
        """Eight searches have news at the same time, and the engine has room for one prefill."""
        engine, search, load = SlowEngine(pause_s=0.01), PlayedSearch([1], [1]), EngineLoad(1)
        async with played_server(engine, search, SpeculateGeneration(odds=False), Split(), load=load) as server:
            graph = one_shot(topk=1).compile()
            runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(8)]
            while len(search.handles) < 8:
                await asyncio.sleep(0)
            search.next()
            while not engine.sent:
                await asyncio.sleep(0)
            assert len(engine.sent) == server.wavefront.count("engine", speculative=True) == 1 >= load.pending
            search.next()
            traces = [result.trace for result in await asyncio.gather(*runs)]
        assert sum(trace.refused for trace in traces) == 7 and load.pending == 0

    async def test_several_generations_after_one_search_are_admitted_one_by_one(self) -> None:
        engine, search, load = SlowEngine(pause_s=0.01), PlayedSearch([1, 2, 3], [1, 2, 3]), EngineLoad(2)
        async with played_server(engine, search, SpeculateGeneration(odds=False), Split(), load=load) as server:
            run = asyncio.create_task(server.run(recomp(topk=3, each=True).compile(), "why?"))
            while not search.handles:
                await asyncio.sleep(0)
            search.next()
            while len(engine.sent) < 2:
                await asyncio.sleep(0)
            assert len(engine.sent) == server.wavefront.count("engine", speculative=True) == 2
            search.next()
            assert (await run).trace.refused == 1 and load.pending == 0

    async def test_a_last_generation_is_no_refused_speculation(self, search: ContinuousIVF) -> None:
        """Nothing follows that could be searched for; there is no room either."""
        async with WorkflowServer(
            SlowEngine(), search, vector, document, PlainPrompts(), transformations=(SpeculateRetrieval(every=1),)
        ) as server:
            server.measurements.speculative_embeddings = 1
            traces = [(await server.run(make().compile(), "why?")).trace for make in (one_shot, hyde)]
        assert traces[0].refused == 0 < traces[1].refused

    async def test_nearest_results_are_speculated_on_first(self) -> None:
        engine = SlowEngine(pause_s=0.001)
        search = PlayedSearch([1], [1])
        async with played_server(engine, search, SpeculateGeneration(1, odds=False), Split()) as server:
            graph = one_shot(topk=1).compile()
            runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(3)]
            while len(search.handles) < 3:
                await asyncio.sleep(0)
            for handle, distance in zip(search.handles, (3.0, 1.0, 2.0), strict=True):
                handle.next(distance)
            while not engine.sent:
                await asyncio.sleep(0)
            assert "question 1" in engine.sent[0].question.text
            search.next()
            await asyncio.gather(*runs)

    async def test_odds_end_what_does_not_come_true(self) -> None:
        engine = SlowEngine(pause_s=0.0005)
        graph = one_shot(topk=1).compile()
        declined = 0
        search = PlayedSearch([1], [2])
        async with played_server(engine, search, SpeculateGeneration(), Split()) as server:
            for number in range(12):
                run = asyncio.create_task(server.run(graph, f"question {number}"))
                while not run.done():
                    search.next()
                    await asyncio.sleep(0.0005)
                declined += run.result().trace.declined
            wrong = next(iter(server.measurements._odds.values())).right(5)
        assert wrong == 0.0 and declined >= 1

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
            while not run.done():
                played.next()
                await asyncio.sleep(0)
            assert run.result().text == long_answer(engine.sent[1]) and engine.sent[0] == engine.sent[1]

    async def test_a_search_by_a_function_begins_as_soon_as_its_query_is_written(self) -> None:
        engine = SlowEngine(lambda request: "first line\n" + "word " * 40, pause_s=0.001)
        began: list[tuple[str, int]] = []

        async def search(query: str, k: int) -> list[str]:
            began.append((query, engine.running))
            await asyncio.sleep(0)
            return [query]

        async with WorkflowServer(engine, search, None, None, PlainPrompts(), transformations=eager()) as server:
            trace = (await server.run(multistep(rounds=2).compile(), "why?")).trace
        assert ("first line", 1) in began
        used = [piece for piece in trace.pieces if piece.worker == "search" and piece.kind == "speculative"]
        assert used[0].outcome == "used"

    async def test_a_function_that_fails_ahead_of_need_is_called_again(self) -> None:
        calls: list[str] = []

        async def search(query: str, k: int) -> list[str]:
            calls.append(query)
            if len(calls) == 1:
                raise InjectedError("a secret")
            return [query]

        engine = SlowEngine(lambda request: "first line\n" + "word " * 40, pause_s=0.001)
        async with WorkflowServer(engine, search, None, None, PlainPrompts(), transformations=eager()) as server:
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
            while len(began) < 4:
                await asyncio.sleep(0)
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
    async def traced(search: ContinuousIVF, engine: SlowEngine, graph: CompiledGraph) -> WorkflowTrace:
        traces: list[WorkflowTrace] = []
        prompts = PlainPrompts()
        async with WorkflowServer(
            engine, search, vector, document, prompts, transformations=eager(), observer=traces.append
        ) as server:
            await server.run(graph, "why?")
            await settled(server, engine, search, prompts)
        return traces[0]


class TestBudget:
    """Wrong speculations take a share of what is taken stage by stage, and the first few."""

    @pytest.mark.parametrize("extra_tokens", [0.0, 0.1, 0.25])
    def test_no_more_is_wasted(self, extra_tokens: float) -> None:
        """Speculating wherever there is room, in workflows of any structure whose provisional results are wrong."""

        async def serve() -> tuple[Any, list[WorkflowTrace]]:
            clock, speeds, traces = asyncio.get_running_loop().time, RandomSpeeds(0), []
            async with WorkflowServer(
                speeds.engine,
                speeds,
                speeds.embed,
                document,
                PlainPrompts(),
                transformations=eager(),
                load=EngineLoad(16, clock=clock),
                clock=clock,
                extra_tokens=extra_tokens,
                observer=traces.append,
            ) as server:
                for seed in range(60):
                    flow = RandomFlow(seed)
                    runnable = flow.graph(speeds.pause).compile(answer=flow.answer)
                    await asyncio.gather(*(server.run(runnable, f"question {number}") for number in range(4)))
            return server.spending, traces

        spending, traces = run_virtual(serve())
        tokens, requests, searches = spending.tokens, spending.requests, spending.searches
        first = 4 if extra_tokens else 0
        assert tokens.held == requests.held == searches.held == 0
        assert requests.wasted <= extra_tokens * requests.due + first
        # What is known is not held: a condition may lead elsewhere.
        assert searches.wasted <= extra_tokens * searches.due + first + 16
        assert tokens.wasted <= extra_tokens * tokens.due + 1000 * first
        assert requests.due > 300 and bool(requests.wasted) is bool(extra_tokens)
        assert sum(trace.wasted_tokens for trace in traces) == tokens.wasted

    async def test_tokens_of_a_speculation_are_those_that_the_engine_has_made(self) -> None:
        engine, search = SlowEngine(pause_s=0.001), PlayedSearch([1], [2])
        async with played_server(engine, search) as server:
            run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
            while not run.done():
                search.next()
                await asyncio.sleep(0.003)
            trace = run.result().trace
        due, (wrong,) = trace.pieces[-1], [piece for piece in trace.pieces if piece.kind == "speculative"]
        assert wrong.outcome == "rolled back" and wrong.prompt_tokens == due.prompt_tokens
        assert trace.wasted_tokens == wrong.prompt_tokens + wrong.tokens == server.spending.tokens.wasted
        assert server.spending.tokens.due == due.prompt_tokens + due.tokens

    async def test_wrong_shares(self) -> None:
        with pytest.raises(ValueError, match="extra_tokens must be at least 0, a share, or None"):
            WorkflowServer(SlowEngine(), PlayedSearch([1]), vector, document, PlainPrompts(), extra_tokens=-1)


class TestServer:
    async def test_streams_the_answer_as_it_is_generated(self, search: ContinuousIVF, index: Any) -> None:
        engine, graph = SlowEngine(lambda request: f" \n {long_answer(request)} \n"), irg(rounds=1).compile()
        async with WorkflowServer(engine, search, vector, document, PlainPrompts()) as server:
            async with server.stream(one_shot().compile(), "why?") as stream:
                pieces = [piece async for piece in stream]
            assert len(pieces) > 10 and "".join(pieces) == stream.text == stream.result.text
            # A later node could change this one: it comes whole.
            async with server.stream(graph, "why?") as stream:
                pieces = [piece async for piece in stream]
            assert pieces == [stream.result.text] and stream.trace.outcome == "answered"

    async def test_nodes_run_in_the_context_of_their_own_request(self, search: ContinuousIVF) -> None:
        """Spans and tenants in context variables: of steps, functions, embeddings and generations, due or ahead."""
        tenant: ContextVar[str] = ContextVar("tenant")
        seen: set[tuple[str, str]] = set()

        async def note(state: Any) -> dict[str, Any]:
            seen.add((tenant.get(), state["query"]))
            return {}

        def query(state: Any) -> str:
            seen.add((tenant.get(), state["query"]))
            return str(state["query"])

        async def embed(query: str) -> Any:
            seen.add((tenant.get(), query))
            return vector(query)

        class Noting(SlowEngine):
            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                seen.add((tenant.get(), request.question.text))
                async for chunk in super().stream(request):
                    yield chunk

        graph = RAGraph("noted").add_step("note", note, pure=True).add_retrieval("search", query=query)
        graph.add_generation("guess", prompt="{query}", output="guess")
        graph.add_generation("answer", prompt="{query}", documents="docs")
        for source, target in pairwise((START, "note", "guess", "search", "answer", END)):
            graph.add_edge(source, target)
        compiled = graph.compile()
        async with WorkflowServer(
            Noting(), search, embed, document, PlainPrompts(), transformations=eager(), load=EngineLoad(16)
        ) as server:

            async def ask(name: str) -> WorkflowTrace:
                tenant.set(name)
                return (await server.run(compiled, name)).trace

            traces = await asyncio.gather(*map(ask, "abcd"))
        assert seen == {(name, name) for name in "abcd"}
        ahead = {piece.worker for trace in traces for piece in trace.pieces if piece.kind == "speculative"}
        assert "search" in ahead

    async def test_one_of_several_answers_of_a_loop_is_streamed_whole(self, search: ContinuousIVF) -> None:
        engine, compiled = SlowEngine(pause_s=0.001), irg(rounds=2).compile()
        async with (
            WorkflowServer(engine, search, vector, document, PlainPrompts()) as server,
            server.stream(compiled, "why?") as stream,
        ):
            pieces = [piece async for piece in stream]
        assert stream.trace.rounds["answer"] == 2 and pieces == [stream.result.text]

    async def test_an_answer_that_a_loop_leads_to_is_generated_once_and_streamed(self, search: ContinuousIVF) -> None:
        """Each round leads to it beside the decision to search again: what the last one has found counts."""
        graph = RAGraph("rounds", max_rounds=2)
        graph.add_step("count", lambda state: {"round": state.get("round", 0) + 1}, writes="round")
        graph.add_retrieval("search", query=lambda state: f"{state['query']} {state['round']}")
        graph.add_generation("answer", prompt="{query} {docs} {round}").add_step("look", lambda state: {})
        graph.add_edge(START, "count").add_edge("count", "search").add_edge("answer", END)
        graph.add_edge("search", "answer").add_edge("search", "look")
        graph.add_edge("look", lambda state: "count" if state["round"] < 2 else END, to=("count", END))
        engine, compiled = SlowEngine(pause_s=0.001), graph.compile()
        async with (
            WorkflowServer(engine, search, vector, document, PlainPrompts()) as server,
            server.stream(compiled, "why?") as stream,
        ):
            pieces = [piece async for piece in stream]
        assert (stream.trace.rounds["search"], stream.trace.rounds["answer"]) == (2, 1)
        assert "".join(pieces) == stream.result.text and len(pieces) > 1
        assert [asked.question.text for asked in engine.sent][-1] == "why? the documents above 2"

    async def test_a_stream_that_is_left_early_frees_its_pieces(self, search: ContinuousIVF) -> None:
        engine, prompts = SlowEngine(pause_s=0.001), PlainPrompts()
        async with WorkflowServer(engine, search, vector, document, prompts) as server:
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
        graph = one_shot().compile()
        progress: list[int] = []

        def answer(request: Asked) -> str:
            if "question 3" in request.question.text:
                raise InjectedError("a secret")
            return long_answer(request)

        questions = (f"question {number}" for number in range(20))
        async with WorkflowServer(
            SlowEngine(answer), search, vector, document, PlainPrompts(), max_requests=4
        ) as server:
            results = {
                number: result async for number, result in server.batch(graph, questions, on_progress=progress.append)
            }
        assert sorted(results) == list(range(20)) and progress == list(range(1, 21))
        failed = results.pop(3)
        assert isinstance(failed, NodeError) and "secret" not in str(failed)
        for number, result in results.items():
            assert result.text == (await interpreted(graph, index, f"question {number}")).text

    @pytest.mark.parametrize("max_waiting", [0, 2])
    async def test_a_batch_waits_for_its_turn_beside_a_full_queue(
        self, search: ContinuousIVF, max_waiting: int
    ) -> None:
        """Two batches at once, and requests that fill the queue: none of a batch is refused, all begin in order."""
        graph, engine = one_shot().compile(), SlowEngine(pause_s=0.001)
        async with WorkflowServer(
            engine,
            search,
            vector,
            document,
            PlainPrompts(),
            transformations=(),
            max_requests=2,
            max_waiting=max_waiting,
        ) as server:

            async def batch(name: str) -> dict[int, Any]:
                questions = (f"{name} {number}" for number in range(10))
                return {number: result async for number, result in server.batch(graph, questions)}

            runs = [asyncio.create_task(server.run(graph, f"single {number}")) for number in range(2 + max_waiting)]
            await asyncio.sleep(0)
            found = await asyncio.gather(batch("first"), batch("second"))
            await asyncio.gather(*runs)
            assert len(server._limiter.queue) == server._limiter.in_flight == 0
        for results in found:
            assert sorted(results) == list(range(10))
            assert all(isinstance(result, WorkflowResult) for result in results.values())
        for name in ("single", "first", "second"):
            sent = [request.question.text for request in engine.sent if name in request.question.text]
            numbers = [int(text.split()[-1]) for text in sent]
            # Two run side by side.
            assert all(abs(place - number) <= 1 for place, number in enumerate(numbers))

    async def test_a_batch_that_is_left_early_leaves_the_queue(self, search: ContinuousIVF) -> None:
        graph, engine, prompts = one_shot().compile(), SlowEngine(pause_s=0.001), PlainPrompts()
        async with WorkflowServer(engine, search, vector, document, prompts, max_requests=3, max_waiting=0) as server:
            single = asyncio.create_task(server.run(graph, "why?"))
            await asyncio.sleep(0)
            async with aclosing(server.batch(graph, (f"question {number}" for number in range(20)))) as results:
                await anext(results)
            assert not server._limiter._patient
            await single
            await settled(server, engine, search, prompts)

    async def test_a_misspelt_option_is_refused(self, search: ContinuousIVF) -> None:
        """Without its scope a request would share the prefixes of those that have none."""
        graph = one_shot().compile()
        wrong: Any = {"scpoe": "acme"}
        says = "a request has no scpoe: its options are state, scope, deadline_s, on_limit, until"
        async with WorkflowServer(SlowEngine(), search, vector, document, PlainPrompts()) as server:
            with pytest.raises(TypeError, match=says):
                await server.run(graph, "why?", **wrong)
            with pytest.raises(TypeError, match=says):
                server.stream(graph, "why?", **wrong)
            with pytest.raises(TypeError, match=says):
                server.batch(graph, ["why?"], **wrong)

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"on_limit": "stop"}, "on_limit is 'stop': give 'return' or 'raise'"),
            ({"deadline_s": 0}, "deadline_s is 0: give seconds above 0, or None"),
            ({"until": "found"}, "until='found' is written by no node: give one of 'answer', 'docs'"),
        ],
    )
    async def test_an_option_that_cannot_be_is_refused(
        self, search: ContinuousIVF, options: dict[str, Any], says: str
    ) -> None:
        async with WorkflowServer(SlowEngine(), search, vector, document, PlainPrompts()) as server:
            with pytest.raises(ValueError, match=says):
                await server.run(one_shot().compile(), "why?", **options)

    async def test_takes_as_many_as_it_may_and_refuses_the_rest(self, search: ContinuousIVF) -> None:
        graph, engine = one_shot().compile(), SlowEngine(pause_s=0.001)
        async with WorkflowServer(
            engine, search, vector, document, PlainPrompts(), max_requests=2, max_waiting=3
        ) as server:
            runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(7)]
            done = await asyncio.gather(*runs, return_exceptions=True)
        refused = [result for result in done if isinstance(result, QueueFullError)]
        assert len(refused) == 2 and sum(isinstance(result, WorkflowResult) for result in done) == 5
        with pytest.raises(ValueError, match="limit must be at least 1"):
            WorkflowServer(engine, search, vector, document, PlainPrompts(), max_requests=0)

    async def test_closing_ends_all_requests_and_takes_no_more(self, search: ContinuousIVF) -> None:
        graph, engine, prompts = multistep().compile(), SlowEngine(pause_s=0.002), PlainPrompts()
        server = WorkflowServer(engine, search, vector, document, prompts, max_requests=3)
        runs = [asyncio.create_task(server.run(graph, f"question {number}")) for number in range(5)]
        while not engine.sent:
            await asyncio.sleep(0.001)
        await server.close()
        for run in runs:
            with pytest.raises(RuntimeError, match="the server was closed"):
                await run
        with pytest.raises(RuntimeError, match="closed"):
            await server.run(graph, "late")
        await settled(server, engine, search, prompts)

    async def test_a_node_that_fails_ends_its_own_request(self, search: ContinuousIVF, index: Any) -> None:
        """A step, a parse, a prompt, an edge, the embedder, the engine: each is named, and no text is told."""

        def fail(*_: Any) -> Any:
            raise InjectedError("a secret")

        def graph(**parts: Any) -> CompiledGraph:
            graph = RAGraph("broken")
            graph.add_step("step", parts.get("step", lambda state: {}), pure=True)
            graph.add_retrieval("search", query=parts.get("query", "query"))
            graph.add_generation(
                "answer", prompt=parts.get("prompt", "{query} {docs}"), documents="docs", parse=parts.get("parse")
            )
            graph.add_edge(START, "step").add_edge("step", "search").add_edge("search", "answer")
            return graph.add_edge("answer", parts.get("edge", END), to=(END,) if "edge" in parts else ()).compile()

        def step(state: Any) -> Any:
            return fail()

        engine, prompts, good = SlowEngine(pause_s=0.0005), PlainPrompts(), one_shot().compile()
        expected = (await interpreted(good, index, "why?")).text
        async with WorkflowServer(engine, search, vector, document, prompts, transformations=eager()) as server:
            for part, node in (
                ("step", "step"),
                ("query", "search"),
                ("prompt", "answer"),
                ("parse", "answer"),
                ("edge", "answer"),
            ):
                bad = server.run(graph(**{part: step if part == "step" else fail}), "why?")
                failed, *others = await asyncio.gather(
                    bad, *(server.run(good, "why?") for _ in range(3)), return_exceptions=True
                )
                assert isinstance(failed, NodeError) and failed.node == node, (part, failed)
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
        graph.add_edge(START, "step").add_edge("step", "answer").add_edge("answer", END)
        engine, prompts = SlowEngine(), PlainPrompts()
        async with WorkflowServer(engine, search, vector, document, prompts) as server:
            with pytest.raises(NodeError, match="workflow 'broken', node 'step': CancelledError"):
                async with asyncio.timeout(60):
                    await server.run(graph.compile(), "why?")
            await settled(server, engine, search, prompts)

    async def test_bad_searches_end_their_request_with_an_error(self, search: ContinuousIVF) -> None:
        """A vector of another dimension, more results than vectors, an index that is gone."""
        engine, prompts = SlowEngine(), PlainPrompts()
        async with WorkflowServer(engine, search, lambda query: np.zeros(3), document, prompts) as server:
            with pytest.raises(NodeError, match=r"node 'search': queries must have the shape \(n, 8\), got \(1, 3\)"):
                await server.run(one_shot().compile(), "why?")
        async with WorkflowServer(engine, search, vector, document, prompts) as server:
            with pytest.raises(NodeError, match=f"node 'search': k={N + 1}, but the index has {N} vectors"):
                await server.run(one_shot(topk=N + 1).compile(), "why?")
            await server.run(one_shot().compile(), "why?")
            search.close()
            with pytest.raises(NodeError, match="node 'search': this search is closed"):
                await server.run(one_shot().compile(), "why?")
            await settled(server, engine, search, prompts)

    async def test_a_search_that_the_index_cannot_answer_ends_its_request_alone(self) -> None:
        """Each error says what to change, and requests beside it are answered."""
        index = small_index()
        engine, prompts, good = SlowEngine(), PlainPrompts(), one_shot().compile()
        expected = (await interpreted(good, index, "why?")).text

        def embed(query: str) -> Any:
            return np.zeros(3) if query == "long" else vector(query)

        with ContinuousIVF(index, cores=1) as search:
            async with WorkflowServer(engine, search, embed, document, prompts, transformations=eager()) as server:

                async def beside(graph: CompiledGraph, question: str) -> str:
                    others = [asyncio.create_task(server.run(good, "why?")) for _ in range(3)]
                    with pytest.raises(NodeError) as refused:
                        await server.run(graph, question)
                    assert [(await other).text for other in others] == [expected] * 3
                    return refused.value.failure

                assert await beside(good, "long") == "queries must have the shape (n, 8), got (1, 3)"
                assert (await beside(one_shot(topk=N + 1).compile(), "why?")).startswith(
                    f"k={N + 1}, but the index has"
                )
                index.nprobe = 0
                with pytest.raises(NodeError, match="node 'search': the index has nprobe 0: set it to at least 1"):
                    await server.run(good, "why?")
                index.nprobe = 8
                assert (await server.run(good, "why?")).text == expected
                await settled(server, engine, search, prompts)

    async def test_a_transformation_or_an_observer_that_fails_changes_nothing(
        self, search: ContinuousIVF, index: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken:
            name = "broken"

            def apply(self, *_: Any) -> None:
                raise InjectedError("a secret")

            def gain_s(self, *_: Any) -> float:
                return 0.0

        graph = irg().compile()
        async with WorkflowServer(
            SlowEngine(),
            search,
            vector,
            document,
            PlainPrompts(),
            transformations=(Broken(), *eager()),
            observer=broken,
        ) as server:
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
        async with WorkflowServer(
            SlowEngine(), search, vector, document, PlainPrompts(), transformations=(Split(), WarmSystemPrompt(warm_up))
        ) as server:
            traces = [(await server.run(one_shot().compile(), "why?", scope="tenant")).trace for _ in range(2)]
        assert prefix.warmed == warm_up.started == 1
        assert ["warm_system_prompt" in trace.pieces[0].applied for trace in traces] == [True, False]
        await warm_up.close()

    async def test_the_trace_is_json_and_holds_no_text(self, search: ContinuousIVF) -> None:
        traces: list[WorkflowTrace] = []
        async with WorkflowServer(
            SlowEngine(pause_s=0.001),
            search,
            vector,
            document,
            PlainPrompts(),
            transformations=eager(),
            observer=traces.append,
        ) as server:
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
            async with WorkflowServer(
                SlowEngine(), search, vector, document, PlainPrompts(), transformations=(Split(), Always())
            ) as server:
                for _ in range(2):
                    await server.run(irg(rounds=2).compile(), "why?")
                await server.run(one_shot().compile(), "why?")
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

        async with WorkflowServer(
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
        for id, options in {
            "a": {},
            "b": {"max_tokens": 7},
            "c": {"stop": ["."]},
            "d": {"documents": "others"},
        }.items():
            graph.add_generation(id, prompt="{query}", output=id, **{"documents": "docs"} | options)
        for source, target in pairwise((START, "search", "more", *"abcd", END)):
            graph.add_edge(source, target)
        _, sent, embedded = await self.rounds(graph)
        assert len(sent) == 4 and embedded == ["why?", "why?"]

    async def test_branches_share_what_is_still_being_answered(self) -> None:
        graph = RAGraph("beside").add_retrieval("one", query="query", output="first")
        graph.add_retrieval("other", query="query", output="second")
        graph.add_generation("a", prompt="{query}", documents="first", output="left")
        graph.add_generation("b", prompt="{query}", documents="second", output="right")
        graph.add_generation("answer", prompt="{left} {right}")
        graph.add_edge(START, "one").add_edge(START, "other").add_edge("one", "a").add_edge("other", "b")
        graph.add_edge("a", "answer").add_edge("b", "answer").add_edge("answer", END)
        _, sent, embedded = await self.rounds(graph, max_generations=1)
        assert len(sent) == 2 and embedded == ["why?"]

    async def test_an_answer_from_memory_is_streamed(self, search: ContinuousIVF) -> None:
        graph = RAGraph("again").add_generation("guess", prompt="{query}", output="guess")
        graph.add_generation("answer", prompt="{query}")
        graph.add_edge(START, "guess").add_edge("guess", "answer").add_edge("answer", END)
        engine = SlowEngine()
        async with (
            WorkflowServer(engine, search, vector, document, PlainPrompts()) as server,
            server.stream(graph.compile(), "why?") as stream,
        ):
            pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.result.text == stream.result.state["guess"] and len(engine.sent) == 1

    async def test_nothing_is_speculated_on_what_is_known(self) -> None:
        search, engine = PlayedSearch([1], [1], [1]), SlowEngine(pause_s=0.001)
        async with played_server(
            engine, search, SpeculateGeneration(odds=False), SpeculateRetrieval(every=1, embeddings=8), Split()
        ) as server:
            run = asyncio.create_task(server.run(irg(topk=1, rounds=3).compile(), "why?"))
            while not run.done():
                search.next()
                await asyncio.sleep(0.001)
        assert len(engine.sent) == 1 and any(piece.kind == "speculative" for piece in run.result().trace.pieces)

    async def test_other_requests_ask_themselves(self) -> None:
        search, engine = PlayedSearch([1]), SlowEngine()
        async with played_server(engine, search, Split()) as server:
            for _ in range(2):
                run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
                while not run.done():
                    search.next()
                    await asyncio.sleep(0)
        assert len(engine.sent) == len(search.handles) == 2


class TestUntil:
    """A request for documents ends with them."""

    @staticmethod
    async def until(
        graph: RAGraph, name: str, *transformations: Any, question: str = "why?"
    ) -> tuple[Any, list[Asked]]:
        engine, prompts = (
            SlowEngine(lambda asked: "One?\nTwo?" if not asked.documents else long_answer(asked)),
            PlainPrompts(),
        )
        with ContinuousIVF(small_index(), cores=1, budget=Budget(SMALL_PIECES)) as search:
            async with WorkflowServer(
                engine, search, vector, document, prompts, transformations=transformations, load=EngineLoad(16)
            ) as server:
                whole = await server.run(graph.compile(), question)
                engine.sent.clear()
                ended = await server.run(graph.compile(), question, until=name)
                assert ended.state[name] == whole.state[name]
                await settled(server, engine, search, prompts)
        return ended, engine.sent

    @pytest.mark.parametrize("transformations", [(), eager()])
    @pytest.mark.parametrize(("make", "before"), [(one_shot, 0), (hyde, 1), (recomp, 0), (multistep, 3), (irg, 2)])
    async def test_the_last_answer_is_not_generated(self, make: Any, before: int, transformations: Any) -> None:
        """Those that lead to another search are: multistep's plan, and all but the last in rounds."""
        result, sent = await self.until(make(), "docs", *transformations)
        due = [piece for piece in result.trace.pieces if piece.worker == "engine" and piece.kind == "due"]
        assert len(due) == before and result.trace.outcome == "answered"
        if not transformations:
            assert len(sent) == before
            assert result.text == (result.state["answer"] if make in (multistep, irg) else "")
        else:
            assert len(sent) <= len([piece for piece in result.trace.pieces if piece.worker == "engine"])

    async def test_a_step_after_the_last_search_runs_if_it_writes_the_documents(self) -> None:
        graph = RAGraph("reranked").add_retrieval("search", query="query", topk=3)
        graph.add_step("rerank", lambda state: {"docs": state["docs"][::-1]}, reads="docs", writes="docs")
        graph.add_generation("answer", prompt="{query} {docs}")
        for source, target in pairwise((START, "search", "rerank", "answer", END)):
            graph.add_edge(source, target)
        assert (await self.until(graph, "docs"))[1] == []

    async def test_an_answer_that_decides_on_another_search_is_generated(self) -> None:
        graph = RAGraph("decides", max_rounds=3).add_retrieval("search", query="query")
        graph.add_generation("answer", prompt="{query} {docs}").add_edge(START, "search").add_edge("search", "answer")
        graph.add_edge("answer", lambda state: END if state.get("answer", "") else "search", to=("search", END))
        result, sent = await self.until(graph, "docs")
        assert len(sent) == 1 and result.text == result.state["answer"]

    async def test_branches_that_do_not_lead_to_it_do_not_run(self) -> None:
        graph = RAGraph("beside").add_retrieval("search", query="query")
        graph.add_generation("guess", prompt="{query}", output="guess").add_generation(
            "answer", prompt="{guess} {docs}"
        )
        graph.add_edge(START, "search").add_edge(START, "guess").add_edge("search", "answer")
        graph.add_edge("guess", "answer").add_edge("answer", END)
        assert (await self.until(graph, "docs"))[1] == []


class TestGains:
    """Each transformation is applied where its estimate is positive, and pieces say so."""

    @pytest.mark.parametrize(("search_s", "split"), [(None, True), (1.0, True), (1e-5, False)])
    async def test_short_searches_are_not_split(
        self, search: ContinuousIVF, search_s: float | None, split: bool
    ) -> None:
        search.budget = Budget(1e-4)
        async with WorkflowServer(
            SlowEngine(), search, vector, document, PlainPrompts(), transformations=(Split(),)
        ) as server:
            server.measurements.search_s.value = search_s
            trace = (await server.run(one_shot().compile(), "why?")).trace
        assert ("split" in trace.pieces[0].applied) is split

    async def test_a_first_request_that_finds_nothing_cached_does_not_end_ordering(self, search: ContinuousIVF) -> None:
        async with WorkflowServer(
            SlowEngine(pause_s=0.005), search, vector, document, PlainPrompts(), transformations=(OrderDocuments(),)
        ) as server:
            for _ in range(3):
                trace = (await server.run(one_shot().compile(), "why?")).trace
                assert trace.pieces[-1].applied == ["order_documents"]
            assert server.measurements.cached_share.value == 0.0
            server.measurements.load._prefill_s.value = 1e-5
            assert (await server.run(one_shot().compile(), "why?")).trace.pieces[-1].applied == []

    async def test_wrong_settings(self) -> None:
        for make in (
            lambda: SpeculateGeneration(0),
            lambda: SpeculateRetrieval(0),
            lambda: SpeculateRetrieval(every=0),
            lambda: SpeculateRetrieval(embeddings=0),
        ):
            with pytest.raises(ValueError, match="at least 1"):
                make()

    @pytest.mark.parametrize(
        ("right", "others", "pays"), [(0.9, 0, True), (0.9, 8, True), (0.3, 0, True), (0.3, 8, False)]
    )
    async def test_a_wrong_generation_counts_for_all_that_are_on_the_engine(
        self, right: float, others: int, pays: bool
    ) -> None:
        """A tenth of a second is left of the search, and a prefill takes half of that."""
        seen: list[WorkItem] = []

        class Watching(Split):
            def apply(self, wavefront: Any, facts: Any, /) -> None:
                seen.extend(wavefront.new)

        search = PlayedSearch([1], [1])
        async with played_server(SlowEngine(), search, Watching()) as server:
            run = asyncio.create_task(server.run(one_shot(topk=1).compile(), "why?"))
            while not seen:
                await asyncio.sleep(0)
            (piece,) = seen
            piece.stage = Stage(1, 2, np.array([[1]]), np.ones((1, 1), np.float32))
            ahead = WorkItem(piece.request, piece.run, WorkItemTrace("answer", "speculative", "engine"), after=piece)
            transformation = SpeculateGeneration()
            assert transformation.gain_s(ahead, server.measurements) > 0
            server.measurements.load._prefill_s.value = 0.05
            server.measurements.odds(piece).learn([(True, 0.1)] * round(10 * right), [piece.part] * 10)
            server.measurements.odds(piece).learn([(False, 0.1)] * round(10 - 10 * right), [piece.part] * 10)
            server.wavefront._running["engine"] += others
            assert (transformation.gain_s(ahead, server.measurements) > 0) is pays
            server.wavefront._running["engine"] -= others
            run.cancel()
            await asyncio.wait((run,))
