"""Feedback from LangChain of what ends early or never: streams, cancelled tasks, long runs, and graphs of LangGraph."""

from __future__ import annotations

import asyncio
import gc
import operator
import threading
from collections.abc import Iterator
from functools import partial
from itertools import permutations
from typing import Annotated, Any, TypedDict

import pytest

from ragorder.ordering import RequestOutcome

pytest.importorskip("langchain_core")

from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda, RunnablePassthrough
from support.framework_contract import Recorder
from support.langchain_chains import (
    DISCARDED,
    NO_NUMBERS,
    PROMPT,
    STREAMED,
    BoomError,
    Model,
    Told,
    Watched,
    answered,
    by_ranking,
    plain,
    rag,
    raised,
    retrieve,
    usage,
    watched,
    watching,
)

from ragorder.adapters.langchain import CacheOrderRetriever, FeedbackHandler

pytestmark = pytest.mark.merge

try:
    from langgraph.graph import END, START, StateGraph
    from langgraph.types import Command, Send
except ImportError:  # So does LangGraph.
    StateGraph = None  # type: ignore[assignment, misc]


@pytest.fixture
def orderer(caplog: pytest.LogCaptureFixture) -> Iterator[Watched]:
    with watching(caplog) as orderer:
        yield orderer


@pytest.fixture
def retriever(orderer: Watched) -> Any:
    return CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer)


async def finishing(orderer: Recorder) -> None:
    """Asynchronous generators within one that was closed are closed by the event loop, in its own time."""
    for _ in range(200):
        gc.collect()
        if None not in orderer.outcomes:
            break
        await asyncio.sleep(0.01)


class TestStreams:
    @pytest.mark.parametrize(("breaks_after", "outcome"), [(0, DISCARDED), (1, DISCARDED), (2, NO_NUMBERS)])
    async def test_that_break_count_without_numbers_after_their_first_token(
        self, orderer: Watched, breaks_after: int, outcome: RequestOutcome
    ) -> None:
        """That a message begins, in a role, says nothing: some servers tell before they have computed anything."""
        chain = rag(orderer, Model(breaks_after=breaks_after))
        assert await raised(chain, STREAMED, "ab: #7", orderer.config) == [ConnectionError] * 2
        assert orderer.outcomes == [outcome] * 2

    @pytest.mark.parametrize("closed", [True, False])
    async def test_closed_or_dropped_early_count_without_numbers(self, orderer: Watched, closed: bool) -> None:
        chain = rag(orderer, Model())
        stream = chain.stream("ab: #7", orderer.config)
        assert [next(stream), next(stream)] == ["", "so "]
        pieces = chain.astream("ab: #7", orderer.config)
        assert [await anext(pieces), await anext(pieces)] == ["", "so "]
        if closed:
            stream.close()
            await pieces.aclose()
        del stream, pieces
        await finishing(orderer)
        assert orderer.outcomes == [NO_NUMBERS] * 2

    async def test_broken_with_a_fallback_count_without_numbers(self, orderer: Watched) -> None:
        """The first model has computed the prompt; its answer is lost, and the run with it."""
        chain = rag(orderer, Model(breaks_after=3).with_fallbacks([Model()]))
        assert await raised(chain, STREAMED[:1], "ab: #7", orderer.config) == [ConnectionError]
        assert orderer.outcomes == [NO_NUMBERS]

    async def test_without_usage_degrade_the_orderer_and_say_what_to_set(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(reports=False))
        list(chain.stream("ab: #7", orderer.config))
        assert [piece async for piece in chain.astream("ba: #7", orderer.config)]
        assert orderer.outcomes == [NO_NUMBERS, NO_NUMBERS]
        assert len(set(orderer.degraded)) == 1
        assert "streamed without usage" in orderer.degraded[0] and "stream_usage=True" in orderer.degraded[0]

    def test_with_usage_or_broken_or_no_streams_at_all_degrade_nothing(self, orderer: Watched) -> None:
        list(rag(orderer, Model()).stream("ab: #7", orderer.config))
        rag(orderer, Model(reports=False)).invoke("ab: #7", orderer.config)
        with pytest.raises(ConnectionError):
            list(rag(orderer, Model(reports=False, breaks_after=2)).stream("ab: #7", orderer.config))
        closed = rag(orderer, Model(reports=False)).stream("ab: #7", orderer.config)
        next(closed)
        closed.close()
        assert orderer.outcomes == [usage(7), NO_NUMBERS, NO_NUMBERS, NO_NUMBERS]
        assert orderer.degraded == []

    def test_dropped_in_a_cycle_wait_for_no_lock(self, orderer: Watched) -> None:
        """The collector may close a stream in the middle of an event, in the very thread that is at that event."""
        chain = rag(orderer, Model())

        class Collecting:
            def __getattr__(self, name: str) -> Any:
                gc.collect()
                raise AttributeError(name)

        def ask() -> None:
            stream = chain.stream("ab: #1", orderer.config)
            next(stream)
            holder = [stream]
            # It has itself, and so is left to the collector.
            holder.append(holder)
            del stream, holder
            rag(orderer, Told(result=answered({"token_usage": Collecting()}))).invoke("cd: #2", orderer.config)
            list(chain.stream("ef: #3", orderer.config))

        gc.disable()
        try:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "an event of a finaliser waits for the event that it interrupted"
        finally:
            gc.enable()
        assert orderer.outcomes == [NO_NUMBERS, NO_NUMBERS, usage(3)]
        assert (orderer.handler.waiting_orderings, orderer.handler.open_runs) == (0, 0)

    @pytest.mark.skipif(not hasattr(BaseChatModel, "stream_events"), reason="this version has no stream_events")
    def test_by_protocol_events_are_understood(self, orderer: Watched, retriever: Any) -> None:
        def asks(model: Model) -> Runnable[str, Any]:
            def work(prompt: str, config: RunnableConfig) -> Any:
                stream = model.stream_events(f"{prompt} #7", config, version="v3")
                return stream.output

            return retriever | plain | work

        asks(Model()).invoke("ab: ?", orderer.config)
        for breaks_after in (2, 1):
            with pytest.raises(ConnectionError):
                asks(Model(breaks_after=breaks_after)).invoke("ab: ?", orderer.config)
        assert orderer.outcomes == [usage(7), NO_NUMBERS, DISCARDED]


class TestCancellation:
    async def cancel(self, work: Any, started: asyncio.Event) -> None:
        task = asyncio.create_task(work)
        async with asyncio.timeout(60):
            await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    @pytest.mark.parametrize("streams", [False, True])
    async def test_before_the_first_token_discards(self, orderer: Watched, streams: bool) -> None:
        async def stream(chain: Any) -> None:
            async for _ in chain.astream("ab: #7", orderer.config):
                pass

        started = asyncio.Event()
        chain = rag(orderer, Model(started=started, delay_s=10))
        await self.cancel(stream(chain) if streams else chain.ainvoke("ab: #7", orderer.config), started)
        assert orderer.outcomes == [DISCARDED]

    async def test_of_a_stream_after_its_first_token_counts(self, orderer: Watched) -> None:
        async def work() -> None:
            async for piece in rag(orderer, Model()).astream("ab: #7", orderer.config):
                if piece:
                    started.set()
                    await asyncio.sleep(10)

        started = asyncio.Event()
        await self.cancel(work(), started)
        await finishing(orderer)
        assert orderer.outcomes == [NO_NUMBERS]

    @pytest.mark.parametrize("alone", [True, False])
    async def test_of_the_retrieval_leaves_nothing(self, orderer: Watched, alone: bool) -> None:
        """LangChain reports no end of a cancelled retriever."""
        started = asyncio.Event()

        async def slow(question: str) -> list[Document]:
            started.set()
            await asyncio.sleep(10)
            return []

        retriever = CacheOrderRetriever(retriever=RunnableLambda(slow), orderer=orderer)
        await self.cancel((retriever if alone else retriever | plain).ainvoke("ab: ?", orderer.config), started)
        assert orderer.handler.open_runs == 0

    async def test_of_a_model_that_is_asked_alone_leaves_nothing(self, orderer: Watched) -> None:
        """LangChain reports none of that either."""
        started = asyncio.Event()
        await self.cancel(Model(started=started, delay_s=10).ainvoke("#7", orderer.config), started)
        assert orderer.handler.open_runs == 0

    async def test_of_many_leaves_nothing(self, orderer: Watched) -> None:
        chain = rag(orderer, Model(delay_s=0.01))
        tasks = [asyncio.create_task(chain.ainvoke(f"abc: #{number}", orderer.config)) for number in range(40)]
        for number, task in enumerate(tasks):
            await asyncio.sleep(0.001 * (number % 3))
            if number % 2:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)
        assert None not in orderer.outcomes
        assert {usage(number) for number in range(0, 40, 2)} <= set(orderer.outcomes)


class TestBounds:
    def test_runs_that_never_end_are_given_up(self, orderer: Recorder, retriever: Any) -> None:
        """A cancelled retriever of another kind: its end is not reported."""
        handler = FeedbackHandler(max_runs=10)
        streams = []
        for _ in range(20):
            chain = RunnablePassthrough.assign(documents=lambda given: retriever.invoke(given["question"]))
            stream = (chain | RunnableLambda(lambda given: given)).stream({"question": "ab: ?"}, watched(handler))
            next(stream)
            streams.append(stream)
            assert handler.open_runs <= 10
        assert orderer.outcomes.count(None) == handler.waiting_orderings <= 10
        assert set(orderer.outcomes) <= {NO_NUMBERS, None}
        for stream in streams:
            stream.close()
        assert (handler.waiting_orderings, handler.open_runs) == (0, 0)

    def test_a_run_without_end_keeps_so_many_orderings(self, orderer: Watched, retriever: Any) -> None:
        most = []

        def work(_: str, config: RunnableConfig) -> None:
            for _ in range(300):
                retriever.invoke("ab: ?", config)
                most.append(orderer.handler.waiting_orderings)

        RunnableLambda(work).invoke("go", orderer.config)
        assert max(most) == 256
        assert orderer.outcomes == [NO_NUMBERS] * 300

    def test_a_long_run_forgets_what_has_ended(self, orderer: Watched) -> None:
        chain = rag(orderer, Model())
        most = []

        def work(_: str, config: RunnableConfig) -> None:
            for number in range(50):
                chain.invoke(f"ab: #{number}", config)
                most.append((orderer.handler.open_runs, orderer.handler.waiting_orderings))

        RunnableLambda(work).invoke("go", orderer.config)
        assert set(most) == {(1, 0)}


class State(TypedDict, total=False):
    question: str
    documents: list[Document]
    answers: Annotated[list[str], operator.add]


@pytest.mark.skipif(StateGraph is None, reason="needs langgraph")
class TestLangGraph:
    def graph(self, orderer: Recorder, model: Model) -> Any:
        """The nodes know of no callbacks."""
        retriever = CacheOrderRetriever(retriever=RunnableLambda(retrieve), orderer=orderer)
        search = lambda state: {"documents": retriever.invoke(state["question"])}  # noqa: E731
        graph = StateGraph(State).add_sequence([("retrieve", search), ("ask", partial(self.ask, model))])
        return graph.add_edge(START, "retrieve").compile()

    @staticmethod
    def ask(model: Model, state: Any) -> dict[str, Any]:
        prompt = PROMPT.invoke({"context": plain(state["documents"]), "question": state["question"]})
        return {"answers": [model.invoke(prompt).text]}

    async def test_hands_on_from_node_to_node(self, orderer: Watched) -> None:
        graph = self.graph(orderer, Model())
        graph.invoke({"question": "ab: #1"}, orderer.config)
        assert list(graph.stream({"question": "ab: #2"}, orderer.config, stream_mode="updates"))
        assert list(graph.stream({"question": "ab: #3"}, orderer.config, stream_mode="messages"))
        assert [update async for update in graph.astream({"question": "ab: #4"}, orderer.config)]
        graph.batch([{"question": "ab: #5"}], orderer.config)
        assert orderer.outcomes == [usage(number) for number in (1, 2, 3, 4, 5)]

    def fan_out(self, orderer: Recorder, questions: list[str], model: Model) -> Any:
        graph = StateGraph(State)
        inner = self.graph(orderer, model)
        graph.add_node("work", lambda state: {"answers": inner.invoke(state)["answers"]})
        graph.add_conditional_edges(START, lambda _: [Send("work", {"question": question}) for question in questions])
        graph.add_edge("work", END)
        return graph.compile()

    async def test_keeps_nodes_apart_that_run_side_by_side(self, orderer: Watched) -> None:
        """Six at a time retrieve the same documents, in the same order, in one outermost run."""
        six = [f"{''.join(order)}: #{number}" for number, order in enumerate(permutations("abc"))]
        graph = self.fan_out(orderer, six, Model(delay_s=0.01))
        graph.invoke({}, orderer.config)
        await graph.ainvoke({}, orderer.config)
        assert sorted(by_ranking(orderer)) == sorted([(question[:3], usage(int(question[-1]))) for question in six] * 2)

    async def test_discards_what_a_failing_node_retrieved(self, orderer: Watched) -> None:
        graph = self.graph(orderer, Model(errors=[BoomError(), BoomError(), BoomError()]))
        ways = ("invoke", "ainvoke", "stream")
        assert await raised(graph, ways, {"question": "ab: #7"}, orderer.config) == [BoomError] * 3
        assert orderer.outcomes == [DISCARDED] * 3

    def test_finishes_a_stream_that_is_closed_early(self, orderer: Watched) -> None:
        stream = self.graph(orderer, Model()).stream({"question": "ab: #7"}, orderer.config, stream_mode="updates")
        assert "retrieve" in next(stream)
        stream.close()
        assert orderer.outcomes == [DISCARDED]

    def test_does_not_take_a_way_out_of_a_subgraph_for_an_error(self, orderer: Watched, retriever: Any) -> None:
        """A subgraph retrieves and leaves for a node of its parent's, which LangGraph does by raising."""

        def search(state: State) -> Command[str]:
            found = {"documents": retriever.invoke(state["question"])}
            return Command(graph=Command.PARENT, goto="ask", update=found)

        inner = StateGraph(State)
        inner.add_node("retrieve", search)
        inner.add_edge(START, "retrieve")
        graph = StateGraph(State)
        graph.add_node("inner", inner.compile(), destinations=("ask",))
        graph.add_node("ask", lambda state: self.ask(Model(), state))
        graph.add_edge(START, "inner")
        graph.compile().invoke({"question": "ab: #7"}, orderer.config)
        assert orderer.outcomes == [usage(7)]
