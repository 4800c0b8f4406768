"""A server of workflows answers as the plain interpreter does, whatever it speculates on; it asks nothing twice."""

from __future__ import annotations

import asyncio
from itertools import count, islice
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
    PlayedSearch,
    SlowEngine,
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
from ragorder.pipelining import ContinuousIVF, EngineLoad, StagedIVF
from ragorder.pipelining.search import Budget
from ragorder.pipelining.workflow import (
    END,
    START,
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
from ragorder.pipelining.workflow.transformations import (
    OrderDocuments,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
)

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
    search = (speeds.found, None, None) if whole else (speeds, speeds.embed, document)
    options: dict[str, Any] = {"load": EngineLoad(16, clock=clock), "clock": clock}
    async with eager_server(speeds.engine, *search, prompts, transformations=transformations, **options) as server:
        result = await server.run(flow.graph(speeds.pause).compile(answer=flow.answer), "which?")
    assert prompts.open == 0
    return result


class TestAnswers:
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
