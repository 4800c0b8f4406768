"""No request of a server of workflows is lost, answered twice or left running, whatever fails and whenever it ends."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from support.rings import length
from support.waiting import turns, until

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.workflow_server import (
    InjectedError,
    PlayedSearch,
    SlowEngine,
    document,
    eager_server,
    interpreted,
    server_of,
    settled,
    small_index,
    vector,
)
from support.workflows import Asked, PlainPrompts, chain

from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.pipelining import AnswerChunk, ContinuousIVF, EngineLoad, Stage
from ragorder.pipelining.search import Budget
from ragorder.pipelining.workflow import (
    END,
    START,
    DeadlineError,
    GraphError,
    NodeError,
    RAGraph,
    State,
    WorkflowServer,
    WorkflowTrace,
    hyde,
    irg,
    multistep,
    one_shot,
    recomp,
)
from ragorder.pipelining.workflow.join import Tokens
from ragorder.pipelining.workflow.result import WorkItemTrace
from ragorder.pipelining.workflow.wavefront import Measurements, Wavefront, WorkItem

GRAPHS = [graph.compile() for graph in (one_shot(), multistep(rounds=2), irg(rounds=2), hyde(), recomp(each=True))]
_OF_A_REQUEST = {
    *("Attempt", "History", "Memory", "NodeRun", "PastSearch", "RunningSearch", "SearchHandle", "Speculation"),
    *("Speculations", "SpeculativeGeneration", "SpeculativeSearch", "State", "Tokens", "WorkItem", "WorkItemTrace"),
    *("WorkflowRun", "WorkflowTrace"),
}


async def nearest(_: Any, k: int) -> Any:
    return range(k)


class FailingEngine(SlowEngine):
    """Fails before, within and after answers, and gives way now and then."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        self._fail(0.02)
        async for chunk in super().stream(request):
            yield chunk
            self._fail(0.001)
        self.sent.clear()
        self._fail(0.01)

    def _fail(self, share: float) -> None:
        if self.random.random() < share:
            raise InjectedError("a secret")


class FailingSearch(ContinuousIVF):
    def __init__(self, *args: Any, random: Random, **options: Any) -> None:
        super().__init__(*args, **options)
        self.random = random

    def submit(self, *args: Any, **options: Any) -> Any:
        if self.random.random() < 0.02:
            raise InjectedError("a secret")
        handle = super().submit(*args, **options)
        if self.random.random() < 0.02:
            handle.fail(InjectedError("a secret"))
        return handle


async def test_ten_thousand_requests() -> None:
    """Failures of engine, search, embedder and documents; cancellations at random times."""
    count, random, index = length(10_000, 250), Random(0), small_index()
    engine, prompts, traces = FailingEngine(random), PlainPrompts(), []
    expected = {
        (graph.name, question): (await interpreted(graph, index, f"question {question}")).text
        for graph in GRAPHS
        for question in range(4)
    }

    async def embed(query: str) -> Any:
        await asyncio.sleep(0)
        if random.random() < 0.02:
            raise InjectedError("a secret")
        return vector(query)

    def fetched(id: int) -> str:
        if random.random() < 0.002:
            raise InjectedError("a secret")
        return document(id)

    outcomes: Counter[str] = Counter()

    async def request(server: WorkflowServer[Any, Any], number: int) -> None:
        graph, question = random.choice(GRAPHS), random.randrange(4)
        run = asyncio.create_task(server.run(graph, f"question {question}"))
        if random.random() < 0.3:
            await turns(random.randrange(120))
            run.cancel()
            if random.random() < 0.2:
                await asyncio.sleep(0)
                run.cancel()
        try:
            assert (await run).text == expected[graph.name, question]
            outcomes["answered"] += 1
        except asyncio.CancelledError:
            outcomes["cancelled"] += 1
        except NodeError as error:
            assert "InjectedError" in str(error) and "secret" not in str(error)
            outcomes["failed"] += 1

    with FailingSearch(index, cores=1, budget=Budget(1e-12), random=random) as search:
        async with eager_server(engine, search, embed, fetched, prompts, observer=traces.append) as server:
            for start in range(0, count, 50):
                await asyncio.gather(*(request(server, number) for number in range(start, start + 50)))
            await settled(server, engine, search, prompts)
    assert outcomes.total() == count and min(outcomes.values()) > count / 50
    # A request that is cancelled before it starts has no trace.
    ended = Counter(trace.outcome for trace in traces)
    assert ended["answered"] == outcomes["answered"] and ended["failed"] == outcomes["failed"]
    assert all(piece.outcome != "running" for trace in traces for piece in trace.pieces)
    speculative = Counter(piece.outcome for trace in traces for piece in trace.pieces if piece.kind == "speculative")
    assert speculative["used"] and speculative["rolled back"]


class LoopHandle:
    """A search in the event loop: two wrong results, then the right one."""

    stage: Any = None

    def __init__(self, right: list[int], running: set[LoopHandle]) -> None:
        self._right = right
        self._running = running
        running.add(self)

    def promote(self) -> None: ...

    def cancel(self) -> bool:
        self._running.discard(self)
        return True

    async def stages_async(self) -> AsyncGenerator[Stage, None]:
        for number, ids in enumerate((self._right[::-1], self._right[::-1], self._right), 1):
            await turns(6)
            found = np.array([ids])
            yield Stage(number, 3, found, np.ones(found.shape, np.float32))


class LoopSearch:
    def __init__(self, index: Any) -> None:
        self._index = index
        self.running: set[LoopHandle] = set()

    def submit(self, vector: Any, k: int, **_: Any) -> LoopHandle:
        return LoopHandle(self._index.search(vector[None], k)[1][0].tolist(), self.running)


@pytest.mark.parametrize("max_generations", [None, 1])
@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
async def test_cancelled_at_every_turn_of_the_event_loop(graph: Any, max_generations: int | None) -> None:
    """From the first turn to the last, each once; another request beside it is answered all the same."""
    index = small_index()
    expected = (await interpreted(graph, index, "why?")).text

    async def embed(query: str) -> Any:
        await asyncio.sleep(0)
        return vector(query)

    for count in range(0, 10_000, length(1, 7)):
        engine, prompts, search = SlowEngine(), PlainPrompts(), LoopSearch(index)
        options: dict[str, Any] = {"load": EngineLoad(8), "max_generations": max_generations}
        async with eager_server(engine, search, embed, document, prompts, **options) as server:
            run, other = (asyncio.create_task(server.run(graph, "why?")) for _ in range(2))
            await turns(count)
            finished = run.done()
            run.cancel()
            await asyncio.wait((run,))
            assert run.cancelled() != finished
            assert (await other).text == expected
            assert not search.running and engine.running == 0 and prompts.open == 0
            assert all(server.wavefront.count(worker) == 0 for worker in ("engine", "search", "step"))
            assert server.measurements.load.pending == 0 and asyncio.all_tasks() == {asyncio.current_task()}
        if finished:
            assert run.result().text == expected
            break
    assert count > 20


async def test_an_embedding_ahead_of_need_has_ended_with_its_request() -> None:
    """Its client takes some turns of the event loop to be cancelled."""
    embedding = 0

    async def embed(query: str) -> Any:
        nonlocal embedding
        embedding += 1
        try:
            await asyncio.sleep(3600)
        finally:
            await turns(20)
            embedding -= 1

    engine = SlowEngine(pause_s=0.001)
    async with eager_server(engine, PlayedSearch(), embed) as server:
        run = asyncio.create_task(server.run(hyde().compile(), "why?"))
        await until(lambda: embedding)
        run.cancel()
        await asyncio.wait((run,))
        assert embedding == 0


class TestLimits:
    """`max_rounds` and deadlines end a request with the best answer so far, and nothing is left running."""

    @staticmethod
    async def limited(graph: RAGraph, *, stream: bool = False, **options: Any) -> tuple[Any, str, float]:
        """Result or error, what was shown, and when it ended: a word takes a second, a search none."""
        engine, prompts, clock = SlowEngine(pause_s=1.0), PlainPrompts(), asyncio.get_running_loop().time
        shown, traces = list[str](), list[WorkflowTrace]()
        setup: dict[str, Any] = {"max_requests": 1, "clock": clock, "observer": traces.append, "memo": False}
        async with server_of(nearest, engine, prompts, **setup) as server:
            result: Any
            try:
                if stream:
                    async with server.stream(graph.compile(), "why?", **options) as pieces:
                        shown = [piece async for piece in pieces]
                    result = pieces.result
                else:
                    result = await server.run(graph.compile(), "why?", **options)
            except (GraphError, DeadlineError) as error:
                result = error
            ended_s = clock()
            assert engine.running == prompts.open == 0
            assert traces[-1].outcome == ("failed" if isinstance(result, Exception) else result.trace.outcome)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result, "".join(shown), ended_s

    @staticmethod
    def checked() -> RAGraph:
        """It never finds its answer good enough."""
        graph = RAGraph("checked", max_rounds=2).add_retrieval("search", query="query", topk=2)
        graph.add_generation("answer", prompt="{query} {docs}")
        graph.add_step("check", lambda state: {"checked": True}, writes="checked")
        graph.add_edge(START, "search").add_edge("search", "answer").add_edge("answer", "check")
        return graph.add_edge("check", lambda state: "search", to=("search", END))

    def test_rounds(self) -> None:
        result, _, _ = run_virtual(self.limited(self.checked()))
        assert result.text == result.state["answer"] != "" and result.state["checked"]
        assert result.trace.outcome == "limited"
        assert result.trace.rounds == dict.fromkeys(("search", "answer", "check"), 2)

    def test_rounds_as_an_error_or_without_an_answer(self) -> None:
        graph = RAGraph("searches", max_rounds=2).add_retrieval("search", query="query")
        graph.add_generation("answer", prompt="{docs}").add_edge(START, "search").add_edge("answer", END)
        graph.add_edge("search", lambda state: "search", to=("search", "answer"))
        for limited in (self.limited(graph), self.limited(self.checked(), on_limit="raise")):
            error, _, _ = run_virtual(limited)
            assert isinstance(error, GraphError) and "node 'search' has run 2 times, its max_rounds" in str(error)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_deadline(self, stream: bool) -> None:
        """An answer of twenty words takes 22 seconds: the first one is there, the second is not."""
        result, shown, ended_s = run_virtual(self.limited(irg(rounds=3), deadline_s=30.0, stream=stream))
        assert (result.trace.outcome, ended_s) == ("limited", 30.0)
        assert result.text == result.state["answer"] and result.state["round"] == 1
        assert shown == (result.text if stream else "")
        result, _, ended_s = run_virtual(self.limited(irg(rounds=2), deadline_s=1000.0, stream=stream))
        assert result.trace.outcome == "answered" and ended_s < 100, "this one is not reached"

    @pytest.mark.parametrize(("graph", "on_limit", "ended_s"), [(one_shot(), "return", 10.0), (irg(), "raise", 30.0)])
    def test_a_deadline_without_an_answer_or_as_an_error(self, graph: RAGraph, on_limit: str, ended_s: float) -> None:
        error, _, ended_at_s = run_virtual(self.limited(graph, deadline_s=ended_s, on_limit=on_limit))
        assert isinstance(error, DeadlineError) and isinstance(error, TimeoutError) and ended_at_s == ended_s
        assert str(error) == f"workflow '{graph.name}': no answer within deadline_s={ended_s}"

    def test_what_has_been_shown_is_the_answer(self) -> None:
        result, shown, ended_s = run_virtual(self.limited(one_shot(), deadline_s=10.5, stream=True))
        assert (result.trace.outcome, ended_s) == ("limited", 10.5)
        assert shown == result.text == result.state["answer"] and 0 < len(shown.split()) < 20

    def test_a_deadline_counts_the_time_in_the_queue(self) -> None:
        async def queued() -> tuple[WorkflowTrace, float]:
            clock, traces = asyncio.get_running_loop().time, list[WorkflowTrace]()
            graph = chain(RAGraph("plain").add_generation("answer", prompt="{query}"), "answer").compile()
            engine = SlowEngine(pause_s=1.0)
            async with server_of(nearest, engine, max_requests=1, clock=clock, observer=traces.append) as server:
                first = asyncio.create_task(server.run(graph, "first"))
                await asyncio.sleep(0)
                with pytest.raises(DeadlineError):
                    await server.run(graph, "second", deadline_s=5.0)
                ended_s = clock()
                await first
            assert len(engine.sent) == 1
            return traces[0], ended_s

        trace, ended_s = run_virtual(queued())
        assert (trace.outcome, ended_s) == ("failed", 5.0)


async def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    """Answered, failed or cancelled: memory grows by none of them."""
    random = Random(1)
    engine, prompts = FailingEngine(random), PlainPrompts()

    def kept() -> Counter[str]:
        gc.collect()
        kinds = (type(each) for each in gc.get_objects())
        ours = (kind.__name__ for kind in kinds if str(kind.__module__).startswith("ragorder.pipelining."))
        return Counter(name for name in ours if name in _OF_A_REQUEST)

    before = kept()
    with ContinuousIVF(small_index(), cores=1, budget=Budget(1e-12)) as search:
        async with eager_server(engine, search, prompts=prompts) as server:

            async def serve(requests: int) -> None:
                runs = [asyncio.create_task(server.run(random.choice(GRAPHS), "why?")) for _ in range(requests)]
                await turns(60)
                for run in runs[::5]:
                    run.cancel()
                await asyncio.gather(*runs, return_exceptions=True)

            await serve(50)
            await settled(server, engine, search, prompts)
            assert kept() - before == Counter()


def test_what_is_learnt_of_speculations_is_bounded() -> None:
    """By the graphs used last: their number may grow, as where each tenant has one."""
    facts = Measurements(EngineLoad(1), Wavefront(lambda: None), None)

    def odds(name: int) -> Any:
        graph = RAGraph(str(name)).add_retrieval("search", query="query").add_generation("answer", prompt="{docs}")
        compiled = chain(graph, "search", "answer").compile()
        (run,) = Tokens(compiled, State.of("why?")).take()
        request: Any = SimpleNamespace(graph=compiled)
        return facts.odds(WorkItem(request, run, WorkItemTrace(run.id, "due", "search")))

    for name in (0, 1):
        odds(name).learn([(True, 1.0)], [1])
    for name in range(2, 1024):
        odds(name)
    # Asked for, 0 is used more lately than 1.
    assert odds(0).right(1) == 1.0
    odds(1024)
    assert odds(0).right(1) == 1.0 and odds(1).right(1) is None
