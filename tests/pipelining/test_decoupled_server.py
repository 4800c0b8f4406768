"""Retrieval and generation have queues and batches of their own; every request ends once, with its own answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.decoupled import expected, plain_server, retrieval_of, separate, server_on
from support.waiting import turns, until
from support.workflow_server import SlowEngine, answer_of, asking, document, embed, question
from support.workflows import Asked, PlainPrompts

from ragorder.pipelining import AnswerChunk, CachedLengths, PartitionedSearch, QueueFullError, plain_retrieval
from ragorder.pipelining.batching import (
    AllWaiting,
    BatchEvent,
    DecoupledServer,
    PartitionedRetrieval,
    Placement,
    RequestTrace,
    Spread,
)
from ragorder.pipelining.workflow import NodeQuestion


@pytest.fixture
def search(path: Path) -> Any:
    with PartitionedSearch(path, 5, resident=1, cores=1) as search:
        yield search


def placed(partitions: int, batch: int = 3) -> Placement:
    return Placement(Spread(device=4), Spread(device=100), partitions, batch, step_tokens=64)


class Busy(SlowEngine):
    """Begins no answer until `go_on`."""

    def __init__(self, go_on: asyncio.Event) -> None:
        super().__init__()
        self.go_on = go_on

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        await self.go_on.wait()
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk


@pytest.mark.parametrize("joins", [True, False])
class TestAnswers:
    async def test_are_those_of_one_request_after_another_and_can_be_streamed(
        self, search: Any, index: Any, joins: bool
    ) -> None:
        prompts, engine = PlainPrompts(), SlowEngine()
        async with DecoupledServer(retrieval_of(search), prompts, engine, joins=joins) as server:
            for number, answer in enumerate(await asyncio.gather(*asking(server, *range(60)))):
                assert (list(answer.documents), answer.text) == answer_of(index, question(number))
                assert answer.usage is not None and answer.usage.finish_reason == "stop"
            async with server.stream(question()) as stream:
                pieces = [piece async for piece in stream]
            assert len(pieces) == 20 and stream.answer is not None
            assert ["".join(pieces)] == [stream.answer.text] == expected(index, 0)
            assert server.unfinished == prompts.open == engine.running == 0 and prompts.confirmed == 61
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_of_a_batch_come_as_they_end(self, search: Any, index: Any, joins: bool) -> None:
        asked: list[int] = []

        def questions() -> Any:
            for number in range(30):
                asked.append(number)
                yield question(number)

        found, progress = dict[int, str](), list[int]()
        async with server_on(search, joins=joins, max_requests=8) as server:
            async for number, answer in server.batch(questions(), on_progress=progress.append):
                assert len(asked) - len(found) <= 5
                assert not isinstance(answer, Exception)
                found[number] = answer.text
        assert [found[number] for number in range(30)] == expected(index, *range(30))
        assert progress == list(range(1, 31))

    async def test_no_request_is_left_when_one_is_cancelled(self, index: Any, joins: bool) -> None:
        """At every turn of the event loop, until it has ended."""

        class InTheLoop:
            async def search_batch(self, tasks: Any) -> AsyncGenerator[Any, None]:
                for place, task in enumerate(tasks):
                    await turns(5)
                    yield place, answer_of(index, task.question)[0]

        for count in range(1000):
            prompts, engine = PlainPrompts(), SlowEngine()
            async with DecoupledServer(InTheLoop(), prompts, engine, joins=joins, batching=AllWaiting(2)) as server:
                run, other = asking(server, 0, 1)
                await turns(count)
                finished = run.done()
                run.cancel()
                await asyncio.wait((run,))
                assert run.cancelled() != finished
                assert [(await other).text] == expected(index, 1)
                assert server.unfinished == engine.running == prompts.open == 0
                assert not server.retrieving.running and not server.generating.running
            if finished:
                break
        assert finished and count > 10

    async def test_a_server_that_is_closed_ends_them(self, search: Any, joins: bool) -> None:
        for count in (0, 1, 3, 10, 40):
            prompts, engine = PlainPrompts(), SlowEngine(pause_s=0.001)
            retrieval = retrieval_of(search)
            server: Any = DecoupledServer(retrieval, prompts, engine, joins=joins, batching=AllWaiting(3))
            runs = asking(server, *range(8))
            for _ in range(count):
                await asyncio.sleep(0.0005)
            await server.close()
            for outcome in await asyncio.gather(*runs, return_exceptions=True):
                assert not isinstance(outcome, BaseException) or "closed" in str(outcome)
            assert server.unfinished == engine.running == prompts.open == 0
            for late in (server.run(question()), server.generating.between_batches(lambda: None)):
                with pytest.raises(RuntimeError, match="closed"):
                    await late


class TestWorkers:
    async def test_all_that_wait_pass_over_the_partitions_once(self, path: Path, whole_index: Any) -> None:
        with PartitionedSearch(path, 5, nprobe=10, cores=1) as search:
            async with server_on(search) as server:
                answers = await asyncio.gather(*asking(server, *range(50)))
            assert search.read_bytes == sum(search.partition_bytes)
        assert {answer.trace.retrieval_batch for answer in answers} == {50}
        assert [answer.text for answer in answers] == expected(whole_index, *range(50))

    async def test_those_that_come_meanwhile_are_the_next_batch(self) -> None:
        sizes, gate = list[int](), asyncio.Event()

        class Gated:
            async def search_batch(self, tasks: Any) -> AsyncGenerator[Any, None]:
                sizes.append(len(tasks))
                await gate.wait()
                for place, task in enumerate(tasks):
                    yield place, [task.question.text]

        async with server_on(Gated()) as server:
            runs = asking(server, 0)
            await until(lambda: sizes)
            runs += asking(server, *range(1, 8))
            await asyncio.sleep(0)
            gate.set()
            await asyncio.gather(*runs)
        assert sizes == [1, 7]

    async def test_a_search_ends_with_its_request_and_the_others_of_its_batch_go_on(self) -> None:
        gate, searching = asyncio.Event(), set()

        async def search(asked: NodeQuestion) -> list[str]:
            searching.add(asked.text)
            try:
                await gate.wait()
                return [asked.text]
            finally:
                searching.discard(asked.text)

        async with server_on(plain_retrieval(search)) as server:
            runs = asking(server, *range(3))
            await until(lambda: len(searching) == 3)
            runs[1].cancel()
            await until(lambda: searching == {"question 0", "question 2"})
            gate.set()
            assert [(await runs[number]).documents for number in (0, 2)] == [["question 0"], ["question 2"]]

    async def test_retrieval_does_not_wait_for_generation_nor_runs_ahead_of_its_queue(self) -> None:
        go_on = asyncio.Event()
        async with plain_server(Busy(go_on), batching=AllWaiting(2), max_contexts=3) as server:
            runs = asking(server, *range(12))
            await turns(200)
            assert len(server.generating.running) == 2 and server.generating.waiting <= 3
            assert server.retrieving.waiting == 12 - 2 - server.generating.waiting
            go_on.set()
            assert len(await asyncio.gather(*runs)) == 12

    @pytest.mark.parametrize("joins", [True, False])
    async def test_a_hook_runs_between_two_batches_and_never_within_one(self, joins: bool) -> None:
        engine, seen = SlowEngine(), []
        async with plain_server(engine, joins=joins, batching=AllWaiting(4)) as server:

            def reorganise() -> str:
                seen.append((engine.running, len(server.generating.running)))
                return "thread"

            async def in_the_loop() -> str:
                for _ in range(20):
                    reorganise()
                    await asyncio.sleep(0)
                return "coroutine"

            runs = asking(server, *range(24))
            await until(lambda: engine.running)
            hooks: list[Any] = [reorganise, in_the_loop, lambda: 1 // 0, lambda: next(iter(()))]
            results = await asyncio.gather(*map(server.generating.between_batches, hooks), return_exceptions=True)
            assert results[:2] == ["thread", "coroutine"]
            assert list(map(type, results[2:])) == [ZeroDivisionError, RuntimeError]
            assert set(seen) == {(0, 0)} and not all(run.done() for run in runs)
            searched: list[bool] = []
            await server.retrieving.between_batches(lambda: searched.append(not server.retrieving.running))
            assert searched == [True]
            await asyncio.gather(*runs)

    async def test_a_hook_whose_caller_is_gone_holds_up_no_request(self) -> None:
        go_on = asyncio.Event()
        async with plain_server(Busy(go_on), batching=AllWaiting(2)) as server:
            runs = asking(server, 0)
            await until(lambda: server.generating.running)
            hook = asyncio.create_task(server.generating.between_batches(lambda: pytest.fail("called")))
            await asyncio.sleep(0)
            hook.cancel()
            await asyncio.wait((hook,))
            runs += asking(server, 1)
            await until(lambda: len(server.generating.running) == 2)
            go_on.set()
            await asyncio.gather(*runs)

    async def test_a_placement_changes_batch_and_partitions(self, search: Any) -> None:
        async with server_on(search, placement=placed(2), batching=AllWaiting()) as server:
            assert search.resident == 2
            await asyncio.gather(*asking(server, *range(20)))
            assert max(event.batch for event in server.trace if event.worker == "generation") == 3
            assert {event.partitions for event in server.trace if event.worker == "retrieval"} <= {0, 1, 2}
            runs = asking(server, *range(20))
            await server.place(placed(0, batch=5))
            assert search.resident == 0 and search.held == []
            await asyncio.gather(*runs)
            answers = await asyncio.gather(*asking(server, *range(20)))
            assert max(answer.trace.generation_batch for answer in answers) == 5
            for partitions, batch in ((1, 0), (-1, 1), (6, 1)):
                with pytest.raises(ValueError, match=r"batch of at least 1|resident must be 0 to 5"):
                    await server.place(SimpleNamespace(partitions=partitions, batch=batch))

    async def test_a_placement_frees_memory_on_one_side_before_the_other_takes_it(self, search: Any) -> None:
        order: list[tuple[str, int]] = []

        class Placed(SlowEngine):
            def place(self, placement: Placement) -> int:
                order.append(("engine", search.resident))
                return 1000

        async with server_on(search, Placed(), placement=placed(2)) as server:
            runs = asking(server, *range(12))
            for partitions in (4, 1):
                await server.place(placed(partitions))
                order.append(("server", search.resident))
            await asyncio.gather(*runs)
        # Of more partitions the engine gives up its memory first; fewer give up theirs.
        assert order == [("engine", 2), ("server", 4), ("engine", 1), ("server", 1)]
        order.clear()
        # Without a first placement they are those of the search.
        search.resize(3)
        async with server_on(search, Placed()) as server:
            await asyncio.gather(*asking(server, *range(12)))
            await server.place(placed(1))
        assert order == [("engine", 1)] and search.resident == 1

    async def test_a_placement_gives_back_what_was_relieved(self, search: Any) -> None:
        async with server_on(search, placement=placed(4)) as server:
            await asyncio.gather(*asking(server, *range(12)))
            assert search.relieve() and search.resident < 4
            await server.place(placed(4))
            assert search.resident == 4

    async def test_requests_go_on_while_an_engine_is_placed(self, search: Any) -> None:
        """Answers begin and end between the begin and the end of a move."""
        begun, go_on = threading.Event(), threading.Event()

        class Placed(SlowEngine):
            def place(self, placement: Placement) -> int:
                begun.set()
                assert go_on.wait(60)
                return 1000

        async with server_on(search, Placed(), placement=placed(2)) as server:
            moving = asyncio.create_task(server.place(placed(2, batch=5)))
            await asyncio.to_thread(begun.wait, 60)
            answers = await asyncio.gather(*asking(server, *range(8)))
            # How many of the three that may run do so is the batcher's choice.
            assert max(answer.trace.generation_batch for answer in answers) <= 3 and not moving.done()
            go_on.set()
            await moving
            assert server.generating.most == 5
            await asyncio.gather(*asking(server, *range(8)))

    @pytest.mark.parametrize("fits", [True, False])
    async def test_an_engine_without_room_is_asked_again_when_requests_end(self, search: Any, fits: bool) -> None:
        go_on, asked = asyncio.Event(), list[int]()

        class Full(Busy):
            def place(self, placement: Placement) -> int | None:
                asked.append(len(server.generating.running))
                return 1000 if fits and len(asked) > 1 and asked[-1] <= 1 else None

        async with server_on(search, Full(go_on), placement=placed(2, 4)) as server:
            runs = asking(server, *range(6))
            await until(lambda: len(server.generating.running) == 4)
            moving = asyncio.create_task(server.place(placed(1, batch=1)))
            await until(lambda: asked)
            go_on.set()
            if fits:
                await moving
                assert (server.generating.most, search.resident) == (1, 1)
            else:
                with pytest.raises(TimeoutError, match="no room for this placement"):
                    await moving
                assert (server.generating.most, search.resident) == (4, 2)
            await asyncio.gather(*runs)
        # None that came later than the move began beside more than its batch.
        assert asked[0] == 4 and min(asked) <= 1

    @pytest.mark.parametrize("error", [OSError("the disk has failed"), StopIteration()])
    async def test_an_engine_that_cannot_be_placed_leaves_batch_and_partitions(
        self, search: Any, error: Exception
    ) -> None:
        class Broken(SlowEngine):
            def place(self, placement: Placement) -> int:
                raise error

        async with asyncio.timeout(60), server_on(search, Broken(), placement=placed(2)) as server:
            for partitions, batch in ((0, 1), (4, 5)):
                with pytest.raises((OSError, RuntimeError), match=r"the disk has failed|StopIteration"):
                    await server.place(placed(partitions, batch))
                assert (server.generating.most, search.resident) == (3, 2)
            await asyncio.gather(*asking(server, *range(6)))

    @pytest.mark.parametrize("resident", [0, 4])
    async def test_a_placement_that_is_cancelled_leaves_batch_and_partitions(self, path: Path, resident: int) -> None:
        """Also one whose partitions are just being set, in a thread."""
        begun, go_on = threading.Event(), threading.Event()

        class Slow(PartitionedSearch):
            def resize(self, resident: int) -> None:
                begun.set()
                assert go_on.wait(60)
                super().resize(resident)

        with Slow(path, 5, resident=2, cores=1) as search:
            async with server_on(search) as server:
                moving = asyncio.create_task(server.place(placed(resident)))
                assert await asyncio.to_thread(begun.wait, 60)
                moving.cancel()
                await turns(5)
                go_on.set()
                await asyncio.wait((moving,))
                assert moving.cancelled() and (server.generating.most, search.resident) == (None, 2)

    async def test_requests_that_are_cached_go_first(self) -> None:
        """Within the window, and the others in order of arrival."""
        engine = SlowEngine()

        def lengths(asked: NodeQuestion, documents: Sequence[str]) -> CachedLengths:
            return CachedLengths(100.0 if asked.text[-1] in "37" else 0.0, 10)

        async with plain_server(engine, batching=AllWaiting(1), lengths=lengths) as server:
            await asyncio.gather(*asking(server, *range(10)))
        order = [int(request.question.text[-1]) for request in engine.sent]
        assert order == [3, 7, 0, 1, 2, 4, 5, 6, 8, 9] or order == [0, 3, 7, 1, 2, 4, 5, 6, 8, 9]

    async def test_lengths_are_not_read_while_no_request_may_join(self) -> None:
        """Reading those of all that wait whenever one comes takes the event loop's time."""
        go_on, read, runs = asyncio.Event(), list[str](), list[Any]()

        def lengths(asked: NodeQuestion, documents: Sequence[str]) -> CachedLengths:
            read.append(asked.text)
            return CachedLengths(0.0, 1.0)

        async with plain_server(Busy(go_on), batching=AllWaiting(1), lengths=lengths) as server:
            for number in range(10):
                runs += asking(server, number)
                await until(lambda: len(server.generating.running) + server.generating.waiting > number)  # noqa: B023
                await turns(5)
            assert server.generating.waiting == 9 and read == []
            go_on.set()
            answers = await asyncio.gather(*runs)
        assert [answer.documents for answer in answers] == [(await separate(question(number))) for number in range(10)]
        # Once for each choice among several.
        assert len(read) == sum(range(2, 10))

    async def test_the_trace_has_each_batch_and_each_request(self, search: Any) -> None:
        seen: list[Any] = []
        async with server_on(search, joins=False, batching=AllWaiting(4), observer=seen.append) as server:
            await asyncio.gather(*asking(server, *range(10)))
        events = [each for each in seen if isinstance(each, BatchEvent)]
        traces = [each for each in seen if isinstance(each, RequestTrace)]
        assert events == list(server.trace) and len(traces) == 10
        began = [event for event in events if event.worker == "generation" and event.event == "began"]
        assert [event.running for event in began] == [4, 4, 2]
        for trace in traces:
            times: list[Any] = [trace.arrived_s, trace.retrieval_began_s, trace.found_s, trace.generation_began_s]
            times += [trace.first_token_s, trace.ended_s]
            assert times == sorted(times)
            assert trace.outcome == "answered" and trace.waited_s is not None and trace.waited_s >= 0
            assert trace.prompt_tokens == 40 and trace.cached_tokens == 0 and trace.failures == 0
            assert "question" not in str(trace.as_record())


class TestLimits:
    async def test_a_batch_waits_for_places_that_others_have_and_a_request_is_refused(self) -> None:
        go_on, found = asyncio.Event(), dict[int, Any]()
        async with plain_server(Busy(go_on), max_requests=2) as server:
            others = asking(server, 8, 9)
            await asyncio.sleep(0)

            async def collect() -> None:
                batch = server.batch(map(question, range(5)))
                found.update({number: answer.documents async for number, answer in batch})  # type: ignore[union-attr]

            collecting = asyncio.create_task(collect())
            await turns(100)
            assert server.unfinished == 2 and not found
            with pytest.raises(QueueFullError, match="max_requests"):
                await server.run(question())
            go_on.set()
            await asyncio.gather(collecting, *others)
            await server.run(question())
        assert found == {number: [f"about question {number}"] for number in range(5)}

    @pytest.mark.parametrize("closed", [False, True])
    async def test_a_batch_that_waits_ends_with_the_server_and_left_it_takes_no_place(self, closed: bool) -> None:
        go_on = asyncio.Event()
        async with plain_server(Busy(go_on), max_requests=1) as server:
            (other,) = asking(server, 1)
            await asyncio.sleep(0)
            batch = server.batch([question(2)])
            waiting = asyncio.create_task(anext(batch))
            await turns(10)
            if closed:
                await server.close()
                number, error = await waiting
                assert number == 0 and isinstance(error, RuntimeError) and "closed" in str(error)
            else:
                waiting.cancel()
                await asyncio.wait((waiting,))
                go_on.set()
            await batch.aclose()
            await asyncio.gather(other, return_exceptions=True)
            assert server.unfinished == 0
            if not closed:
                assert (await server.run(question(3))).documents == ["about question 3"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_requests": 0}, "max_requests must be at least 1"),
            ({"max_contexts": 0}, "max_contexts must be at least 1"),
            ({"kv_limit": 100}, "and kv"),
            ({"kv_limit": -1, "kv": len}, "give at least 1"),
            ({"max_retries": -1}, "max_retries must not be negative"),
            ({"top_k": 0}, "top_k"),
        ],
    )
    def test_bad_settings(self, search: Any, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            PartitionedRetrieval(search, embed, document, **options) if "top_k" in options else plain_server(**options)
