"""Retrieval and generation have queues and batches of their own; every request ends once, with its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.inside import file_of
from support.workflow_server import SlowEngine, document, long_answer, small_index, vector
from support.workflows import Asked, PlainPrompts

from ragorder.pipelining import AnswerChunk, CachedLengths, PartitionedSearch, QueueFullError, Usage, plain_retrieval
from ragorder.pipelining.batching import (
    AllWaiting,
    AnswerChangedError,
    BatchEvent,
    DecoupledServer,
    PartitionedRetrieval,
    Placement,
    RequestTrace,
    Spread,
    is_shortage,
)
from ragorder.pipelining.batching.degradation import _causes
from ragorder.pipelining.workflow import NodeQuestion


def question(number: int = 0) -> NodeQuestion:
    return NodeQuestion(f"question {number}")


def embed(questions: Sequence[NodeQuestion]) -> Any:
    return np.stack([vector(each.text) for each in questions])


@pytest.fixture(scope="module")
def index() -> Any:
    return small_index()


@pytest.fixture(scope="module")
def path(index: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("index") / "index.faiss"
    faiss.write_index(index, str(path))
    return path


@pytest.fixture
def search(path: Path) -> Any:
    with PartitionedSearch(path, 5, resident=1, cores=1) as search:
        yield search


def retrieval_of(search: PartitionedSearch) -> PartitionedRetrieval[NodeQuestion, str]:
    return PartitionedRetrieval(search, embed, document, top_k=3)


def expected(index: Any, asked: NodeQuestion) -> tuple[list[str], str]:
    found = [document(id) for id in index.search(vector(asked.text)[None], 3)[1][0].tolist()]
    return found, long_answer(Asked(asked, tuple(found)))


async def separate(asked: NodeQuestion) -> list[str]:
    return [f"about {asked.text}"]


def plain_server(engine: Any = None, **options: Any) -> DecoupledServer[Any, Any, Any]:
    return DecoupledServer(plain_retrieval(separate), PlainPrompts(), engine or SlowEngine(), **options)


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
    async def test_are_those_of_one_request_after_another(self, search: Any, index: Any, joins: bool) -> None:
        prompts, engine = PlainPrompts(), SlowEngine()
        async with DecoupledServer(retrieval_of(search), prompts, engine, joins=joins) as server:
            answers = await asyncio.gather(*(server.run(question(number)) for number in range(60)))
            for number, answer in enumerate(answers):
                assert (list(answer.documents), answer.text) == expected(index, question(number))
                assert answer.usage is not None and answer.usage.finish_reason == "stop"
            assert server.unfinished == prompts.open == engine.running == 0 and prompts.confirmed == 60
        assert asyncio.all_tasks() == {asyncio.current_task()}

    async def test_can_be_streamed(self, search: Any, index: Any, joins: bool) -> None:
        async with DecoupledServer(retrieval_of(search), PlainPrompts(), SlowEngine(), joins=joins) as server:
            async with server.stream(question()) as stream:
                pieces = [piece async for piece in stream]
            assert len(pieces) == 20 and stream.answer is not None
            assert "".join(pieces) == stream.answer.text == expected(index, question())[1]

    async def test_of_a_batch_come_as_they_end(self, search: Any, index: Any, joins: bool) -> None:
        asked: list[int] = []

        def questions() -> Any:
            for number in range(30):
                asked.append(number)
                yield question(number)

        progress: list[int] = []
        async with DecoupledServer(
            retrieval_of(search), PlainPrompts(), SlowEngine(), joins=joins, max_requests=8
        ) as server:
            found = {}
            async for number, answer in server.batch(questions(), on_progress=progress.append):
                assert len(asked) - len(found) <= 5
                assert not isinstance(answer, Exception)
                found[number] = answer.text
        assert found == {number: expected(index, question(number))[1] for number in range(30)}
        assert progress == list(range(1, 31))

    async def test_no_request_is_left_when_one_is_cancelled(self, index: Any, joins: bool) -> None:
        """At every turn of the event loop, until it has ended."""

        class InTheLoop:
            async def search_batch(self, tasks: Any) -> AsyncGenerator[Any, None]:
                for place, task in enumerate(tasks):
                    for _ in range(5):
                        await asyncio.sleep(0)
                    yield place, expected(index, task.question)[0]

        for turns in range(1000):
            prompts, engine = PlainPrompts(), SlowEngine()
            async with DecoupledServer(InTheLoop(), prompts, engine, joins=joins, batching=AllWaiting(2)) as server:
                run, other = (asyncio.create_task(server.run(question(number))) for number in (0, 1))
                for _ in range(turns):
                    await asyncio.sleep(0)
                finished = run.done()
                run.cancel()
                await asyncio.wait((run,))
                assert run.cancelled() != finished
                assert (await other).text == expected(index, question(1))[1]
                assert server.unfinished == engine.running == prompts.open == 0
                assert not server.retrieving.running and not server.generating.running
            if finished:
                break
        assert finished and turns > 10

    async def test_a_server_that_is_closed_ends_them(self, search: Any, joins: bool) -> None:
        for turns in (0, 1, 3, 10, 40):
            prompts, engine = PlainPrompts(), SlowEngine(pause_s=0.001)
            server: DecoupledServer[Any, Any, Any] = DecoupledServer(
                retrieval_of(search), prompts, engine, joins=joins, batching=AllWaiting(3)
            )
            runs = [asyncio.create_task(server.run(question(number))) for number in range(8)]
            for _ in range(turns):
                await asyncio.sleep(0.0005)
            await server.close()
            for outcome in await asyncio.gather(*runs, return_exceptions=True):
                assert not isinstance(outcome, BaseException) or "closed" in str(outcome)
            assert server.unfinished == engine.running == prompts.open == 0
            with pytest.raises(RuntimeError, match="closed"):
                await server.run(question())
            with pytest.raises(RuntimeError, match="closed"):
                await server.generating.between_batches(lambda: None)


class TestWorkers:
    async def test_all_that_wait_pass_over_the_partitions_once(self, path: Path, index: Any) -> None:
        index.nprobe, before = 10, index.nprobe
        with PartitionedSearch(path, 5, nprobe=10, cores=1) as search:
            async with DecoupledServer(retrieval_of(search), PlainPrompts(), SlowEngine()) as server:
                answers = await asyncio.gather(*(server.run(question(number)) for number in range(50)))
            assert search.read_bytes == sum(search.partition_bytes)
            assert {answer.trace.retrieval_batch for answer in answers} == {50}
            assert [answer.text for answer in answers] == [expected(index, question(n))[1] for n in range(50)]
        index.nprobe = before

    async def test_those_that_come_meanwhile_are_the_next_batch(self) -> None:
        sizes: list[int] = []
        gate = asyncio.Event()

        class Gated:
            async def search_batch(self, tasks: Any) -> AsyncGenerator[Any, None]:
                sizes.append(len(tasks))
                await gate.wait()
                for place, task in enumerate(tasks):
                    yield place, [task.question.text]

        async with DecoupledServer(Gated(), PlainPrompts(), SlowEngine()) as server:
            runs = [asyncio.create_task(server.run(question(0)))]
            while not sizes:
                await asyncio.sleep(0)
            runs += [asyncio.create_task(server.run(question(number))) for number in range(1, 8)]
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

        async with DecoupledServer(plain_retrieval(search), PlainPrompts(), SlowEngine()) as server:
            runs = [asyncio.create_task(server.run(question(number))) for number in range(3)]
            while len(searching) < 3:
                await asyncio.sleep(0)
            runs[1].cancel()
            await asyncio.wait((runs[1],))
            while len(searching) > 2:
                await asyncio.sleep(0)
            assert searching == {"question 0", "question 2"}
            gate.set()
            assert [(await runs[number]).documents for number in (0, 2)] == [["question 0"], ["question 2"]]

    async def test_retrieval_does_not_wait_for_generation_nor_runs_ahead_of_its_queue(self) -> None:
        gate = asyncio.Event()

        class Held(SlowEngine):
            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                await gate.wait()
                async for chunk in super().stream(request):
                    yield chunk

        engine = Held()
        async with plain_server(engine, batching=AllWaiting(2), max_contexts=3) as server:
            runs = [asyncio.create_task(server.run(question(number))) for number in range(12)]
            for _ in range(200):
                await asyncio.sleep(0)
            assert len(server.generating.running) == 2 and server.generating.waiting <= 3
            assert server.retrieving.waiting == 12 - 2 - server.generating.waiting
            gate.set()
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

            def broken() -> None:
                raise ZeroDivisionError

            runs = [asyncio.create_task(server.run(question(number))) for number in range(24)]
            while not engine.running:
                await asyncio.sleep(0)
            results = await asyncio.gather(
                *(server.generating.between_batches(hook) for hook in (reorganise, in_the_loop, broken)),
                return_exceptions=True,
            )
            assert results[:2] == ["thread", "coroutine"] and isinstance(results[2], ZeroDivisionError)
            assert set(seen) == {(0, 0)} and not all(run.done() for run in runs)
            searched: list[bool] = []
            await server.retrieving.between_batches(lambda: searched.append(not server.retrieving.running))
            assert searched == [True]
            await asyncio.gather(*runs)
            forgotten = asyncio.create_task(server.generating.between_batches(reorganise))
            forgotten.cancel()
            await asyncio.gather(forgotten, return_exceptions=True)
            await server.run(question())

    async def test_a_hook_whose_caller_is_gone_holds_up_no_request(self) -> None:
        go_on = asyncio.Event()
        async with plain_server(Busy(go_on), batching=AllWaiting(2)) as server:
            runs = [asyncio.create_task(server.run(question(0)))]
            while not server.generating.running:
                await asyncio.sleep(0)
            hook = asyncio.create_task(server.generating.between_batches(lambda: pytest.fail("called")))
            await asyncio.sleep(0)
            hook.cancel()
            await asyncio.wait((hook,))
            runs.append(asyncio.create_task(server.run(question(1))))
            while len(server.generating.running) + server.generating.waiting < 2:
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
            assert len(server.generating.running) == 2
            go_on.set()
            await asyncio.gather(*runs)

    async def test_a_placement_is_taken_between_batches(self, search: Any, index: Any) -> None:
        @dataclass
        class Wrong:
            batch: int
            partitions: int

        def placed(batch: int, partitions: int) -> Placement:
            return Placement(Spread(device=4), Spread(device=100), partitions, batch, step_tokens=64)

        async with DecoupledServer(
            retrieval_of(search), PlainPrompts(), SlowEngine(), placement=placed(3, 2), batching=AllWaiting()
        ) as server:
            assert search.resident == 2
            await asyncio.gather(*(server.run(question(number)) for number in range(20)))
            assert max(event.batch for event in server.trace if event.worker == "generation") == 3
            assert {event.partitions for event in server.trace if event.worker == "retrieval"} <= {0, 1, 2}
            runs = [asyncio.create_task(server.run(question(number))) for number in range(20)]
            await server.place(placed(5, 0))
            assert search.resident == 0 and search.held == []
            await asyncio.gather(*runs)
            answers = await asyncio.gather(*(server.run(question(number)) for number in range(20)))
            assert max(answer.trace.generation_batch for answer in answers) == 5
            for wrong in (Wrong(0, 1), Wrong(1, -1), placed(1, 6)):
                with pytest.raises(ValueError, match=r"batch of at least 1|resident must be 0 to 5"):
                    await server.place(wrong)

    async def test_an_engine_takes_its_part_of_a_placement_and_what_becomes_smaller_makes_room(
        self, search: Any, index: Any
    ) -> None:
        order: list[tuple[str, int]] = []

        class Placed(SlowEngine):
            def place(self, placement: Placement) -> None:
                assert not self.running
                order.append(("engine", search.resident))

        def placed(partitions: int) -> Placement:
            return Placement(Spread(device=4), Spread(device=100), partitions, batch=3, step_tokens=64)

        engine = Placed()
        async with DecoupledServer(retrieval_of(search), PlainPrompts(), engine, placement=placed(2)) as server:
            runs = [asyncio.create_task(server.run(question(number))) for number in range(12)]
            for partitions in (4, 1):
                await server.place(placed(partitions))
                order.append(("server", search.resident))
            await asyncio.gather(*runs)
        # Of more partitions the engine gives up its memory first; fewer give up theirs.
        assert order == [("engine", 2), ("server", 4), ("engine", 1), ("server", 1)]

    async def test_requests_that_are_cached_go_first(self) -> None:
        """Within the window, and the others in order of arrival."""
        engine = SlowEngine()

        def lengths(asked: NodeQuestion, documents: Sequence[str]) -> CachedLengths:
            return CachedLengths(100.0 if asked.text[-1] in "37" else 0.0, 10)

        async with plain_server(engine, batching=AllWaiting(1), lengths=lengths) as server:
            await asyncio.gather(*(server.run(question(number)) for number in range(10)))
        order = [int(request.question.text[-1]) for request in engine.sent]
        assert order == [3, 7, 0, 1, 2, 4, 5, 6, 8, 9] or order == [0, 3, 7, 1, 2, 4, 5, 6, 8, 9]

    async def test_lengths_are_not_read_while_no_request_may_join(self) -> None:
        """Reading those of all that wait whenever one comes takes the event loop's time."""
        go_on = asyncio.Event()
        read: list[str] = []

        def lengths(asked: NodeQuestion, documents: Sequence[str]) -> CachedLengths:
            read.append(asked.text)
            return CachedLengths(0.0, 1.0)

        async with plain_server(Busy(go_on), batching=AllWaiting(1), lengths=lengths) as server:
            runs = []
            for number in range(10):
                runs.append(asyncio.create_task(server.run(question(number))))
                while len(server.generating.running) + server.generating.waiting <= number:
                    await asyncio.sleep(0)
                for _ in range(5):
                    await asyncio.sleep(0)
            assert server.generating.waiting == 9 and read == []
            go_on.set()
            answers = await asyncio.gather(*runs)
        assert [answer.documents for answer in answers] == [(await separate(question(number))) for number in range(10)]
        # Once for each choice among several.
        assert len(read) == sum(range(2, 10))

    async def test_the_trace_has_each_batch_and_each_request(self, search: Any) -> None:
        seen: list[Any] = []
        async with DecoupledServer(
            retrieval_of(search),
            PlainPrompts(),
            SlowEngine(),
            joins=False,
            batching=AllWaiting(4),
            observer=seen.append,
        ) as server:
            await asyncio.gather(*(server.run(question(number)) for number in range(10)))
            events = [each for each in seen if isinstance(each, BatchEvent)]
            assert events == list(server.trace)
        traces = [each for each in seen if isinstance(each, RequestTrace)]
        assert len(traces) == 10
        began = [event for event in events if event.worker == "generation" and event.event == "began"]
        assert [event.running for event in began] == [4, 4, 2]
        for trace in traces:
            times = trace.arrived_s, trace.retrieval_began_s, trace.found_s, trace.generation_began_s
            times = (*times, trace.first_token_s)
            assert list(times) == sorted(times) and trace.ended_s is not None and trace.ended_s >= times[-1]
            assert trace.outcome == "answered" and trace.waited_s is not None and trace.waited_s >= 0
            assert trace.prompt_tokens == 40 and trace.cached_tokens == 0 and trace.failures == 0
            assert "question" not in str(trace.as_record())


class TestLimits:
    async def test_a_full_server_says_so(self) -> None:
        async with plain_server(max_requests=3) as server:
            runs = [asyncio.create_task(server.run(question(number))) for number in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(QueueFullError, match="max_requests"):
                await server.run(question())
            await asyncio.gather(*runs)
            await server.run(question())

    async def test_a_batch_waits_for_places_that_others_have(self) -> None:
        go_on = asyncio.Event()
        async with plain_server(Busy(go_on), max_requests=2) as server:
            others = [asyncio.create_task(server.run(question(number))) for number in (8, 9)]
            await asyncio.sleep(0)
            found: dict[int, Any] = {}

            async def collect() -> None:
                batch = server.batch(question(number) for number in range(5))
                found.update({number: answer async for number, answer in batch})

            collecting = asyncio.create_task(collect())
            for _ in range(100):
                await asyncio.sleep(0)
            assert server.unfinished == 2 and not found
            with pytest.raises(QueueFullError, match="max_requests"):
                await server.run(question())
            go_on.set()
            await asyncio.gather(collecting, *others)
            assert {number: answer.documents for number, answer in found.items()} == {
                number: [f"about question {number}"] for number in range(5)
            }

    async def test_a_batch_that_is_left_while_it_waits_takes_no_place(self) -> None:
        go_on = asyncio.Event()
        async with plain_server(Busy(go_on), max_requests=1) as server:
            other = asyncio.create_task(server.run(question(1)))
            await asyncio.sleep(0)
            batch = server.batch([question(2)])
            waiting = asyncio.create_task(anext(batch))
            for _ in range(10):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            await batch.aclose()
            go_on.set()
            await other
            assert server.unfinished == 0
            assert (await server.run(question(3))).documents == ["about question 3"]

    async def test_a_batch_that_waits_ends_with_the_server(self) -> None:
        async with plain_server(Busy(asyncio.Event()), max_requests=1) as server:
            other = asyncio.create_task(server.run(question(1)))
            await asyncio.sleep(0)
            batch = server.batch([question(2)])
            waiting = asyncio.create_task(anext(batch))
            for _ in range(10):
                await asyncio.sleep(0)
            await server.close()
            number, error = await waiting
            assert number == 0 and isinstance(error, RuntimeError) and "closed" in str(error)
            await batch.aclose()
            await asyncio.gather(other, return_exceptions=True)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"max_requests": 0}, "max_requests must be at least 1"),
            ({"max_contexts": 0}, "max_contexts must be at least 1"),
            ({"events": 0}, "events must be at least 1"),
            ({"kv_limit": 100}, "and kv"),
            ({"kv_limit": -1, "kv": len}, "give at least 1"),
            ({"max_retries": -1}, "max_retries must not be negative"),
        ],
    )
    def test_bad_settings(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            plain_server(**options)

    def test_a_top_k_below_one(self, search: Any) -> None:
        with pytest.raises(ValueError, match="top_k"):
            PartitionedRetrieval(search, embed, document, top_k=0)


class OneFailure(SlowEngine):
    """Fails requests with `error` while more than `most` run, `after` so many chunks."""

    def __init__(self, error: Exception, most: int, after: int = 0) -> None:
        super().__init__()
        self.error, self.most, self.after = error, most, after
        self.failures = 0

    async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
        left = self.after
        async with aclosing(super().stream(request)) as chunks:
            async for chunk in chunks:
                if not left and self.running > self.most:
                    self.failures += 1
                    raise self.error
                left -= 1
                yield chunk


class Relieving:
    def __init__(self, engine: OneFailure, times: int) -> None:
        self.engine, self.times = engine, times
        self.calls = 0

    def relieve(self) -> bool:
        self.calls += 1
        if not self.times:
            return False
        self.times -= 1
        self.engine.most += 1
        return True


class TestDegradation:
    @pytest.mark.parametrize("joins", [True, False])
    async def test_batches_get_smaller_until_they_fit(self, joins: bool) -> None:
        engine = OneFailure(MemoryError(), 3)
        async with plain_server(engine, joins=joins, batching=AllWaiting(16)) as server:
            answers = await asyncio.gather(*(server.run(question(number)) for number in range(40)))
            assert len({answer.text for answer in answers}) == 40 and engine.failures
            assert max(answer.trace.failures for answer in answers) <= 4
            limit = server.generating.degradation.limit
            assert limit is not None and limit <= 4
            engine.most = 99
            for _ in range(12):
                await asyncio.gather(*(server.run(question(number)) for number in range(40)))
            # It has grown back.
            assert server.generating.degradation.limit >= 16

    async def test_then_memory_is_relieved_and_then_the_request_ends_with_its_error(self) -> None:
        engine = OneFailure(MemoryError("secret"), 0)
        relief = Relieving(engine, 1)
        async with plain_server(engine, reliefs=[relief]) as server:
            assert (await server.run(question())).trace.failures == 1 and relief.calls == 1
            assert [event.event for event in server.trace if event.event == "relieved"] == ["relieved"]
            engine.most = -1
            with pytest.raises(MemoryError):
                await server.run(question())
            # The first try and two more.
            assert engine.failures == 4
            engine.most = 99
            await server.run(question())

    async def test_memory_is_not_relieved_for_what_is_no_lack_of_it(self) -> None:
        for error, tries in ((OSError("disk"), 3), (ValueError("bad"), 1)):
            engine = OneFailure(error, 0)
            relief = Relieving(engine, 5)
            async with plain_server(engine, reliefs=[relief]) as server:
                with pytest.raises(type(error)):
                    await server.run(question())
            assert relief.calls == 0 and engine.failures == tries

    async def test_requests_that_failed_keep_their_order(self) -> None:
        class Batches(SlowEngine):
            """All requests of a batch of more than two fail."""

            most = 0

            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                self.most = max(self.most, self.running + 1)
                try:
                    async with aclosing(super().stream(request)) as chunks:
                        async for chunk in chunks:
                            if self.most > 2:
                                raise MemoryError
                            yield chunk
                finally:
                    if not self.running:
                        self.most = 0

        engine = Batches()
        async with plain_server(engine, joins=False, batching=AllWaiting(8)) as server:
            await asyncio.gather(*(server.run(question(number)) for number in range(8)))
        assert len(engine.sent) > 8
        last_try = {request.question.text: place for place, request in enumerate(engine.sent)}
        assert sorted(last_try, key=last_try.__getitem__) == [f"question {number}" for number in range(8)]

    async def test_a_stream_that_failed_in_the_middle_goes_on_where_it_was(self) -> None:
        class Flaky(SlowEngine):
            """The first answer breaks off, the next ones begin otherwise if `changed`."""

            def __init__(self, changed: bool) -> None:
                super().__init__()
                self.changed, self.tries = changed, 0

            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                self.tries += 1
                words = "one two three four" if self.tries == 1 or not self.changed else "one too three four"
                for number, word in enumerate(words.split()):
                    if self.tries == 1 and number == 2:
                        raise MemoryError
                    yield AnswerChunk(f"{word} ")
                yield AnswerChunk("", Usage(1, 0, 4, "stop"))

        async with plain_server(Flaky(False)) as server:
            async with server.stream(question()) as stream:
                assert [piece async for piece in stream] == ["one ", "two ", "three ", "four "]
            assert stream.answer is not None and stream.answer.text == "one two three four "
        async with plain_server(Flaky(True)) as server:
            async with server.stream(question()) as stream:
                with pytest.raises(AnswerChangedError):
                    async for _ in stream:
                        pass
            assert (await server.run(question())).text == "one too three four "

    async def test_a_question_that_fails_its_batch_ends_alone(self, search: Any, index: Any) -> None:
        def picky(questions: Sequence[NodeQuestion]) -> Any:
            if any("13" in each.text for each in questions):
                raise ValueError("not a number")
            return embed(questions)

        retrieval: Any = PartitionedRetrieval(search, picky, document, top_k=3)
        async with DecoupledServer(retrieval, PlainPrompts(), SlowEngine()) as server:
            outcomes = await asyncio.gather(*(server.run(question(n)) for n in range(30)), return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            if number == 13:
                assert isinstance(outcome, ValueError)
            else:
                assert not isinstance(outcome, BaseException) and outcome.text == expected(index, question(number))[1]

    async def test_a_search_that_failed_goes_on_where_it_was(self, path: Path, index: Any) -> None:
        with PartitionedSearch(path, 5, nprobe=10, cores=1, read_ahead=False) as search:
            read, reads = file_of(search).read, []

            def failing(partition: int) -> Any:
                reads.append(partition)
                if len(reads) in (3, 5, 6):
                    raise OSError("the disk")
                return read(partition)

            file_of(search).read = failing  # type: ignore[method-assign]
            async with DecoupledServer(retrieval_of(search), PlainPrompts(), SlowEngine()) as server:
                answer = await server.run(question())
                assert server.retrieving.degradation.limit is None or server.retrieving.degradation.limit >= 1
            assert reads == [0, 1, 2, 2, 3, 3, 3, 4] and answer.trace.failures == 3
            index.nprobe, before = 10, index.nprobe
            assert answer.text == expected(index, question())[1]
            index.nprobe = before

    async def test_a_request_that_is_cancelled_while_its_search_is_taken_up_mixes_up_no_other(
        self, search: Any, index: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its checkpoint goes with it, before the thread has begun."""

        @dataclass
        class Task:
            question: NodeQuestion
            checkpoint: Any = None
            abandoned: bool = False
            cancel_search: Any = None

        tasks = [Task(question(number)) for number in range(5)]
        for task in (tasks[1], tasks[3]):
            passing = search.search(embed([task.question]), 3)
            next(passing)
            task.checkpoint = passing.rows.part([0])

        async def busy(function: Any, *arguments: Any) -> Any:
            await asyncio.sleep(0)
            tasks[1].checkpoint, tasks[1].abandoned = None, True
            return function(*arguments)

        monkeypatch.setattr(asyncio, "to_thread", busy)
        found = {place: documents async for place, documents in retrieval_of(search).search_batch(tasks)}
        assert found == {place: expected(index, tasks[place].question)[0] for place in (0, 2, 3, 4)}

    async def test_a_disk_that_is_gone_ends_the_request(self, path: Path) -> None:
        with PartitionedSearch(path, 5, nprobe=10, cores=1) as search:

            def gone(partition: int) -> Any:
                raise OSError("the disk")

            file_of(search).read = gone  # type: ignore[method-assign]
            async with DecoupledServer(retrieval_of(search), PlainPrompts(), SlowEngine()) as server:
                with pytest.raises(OSError, match="the disk"):
                    await server.run(question())

    def test_what_counts_as_a_shortage(self) -> None:
        class OutOfMemoryError(RuntimeError):
            pass

        class OverloadError(Exception):
            status_code = 503

        wrapped = RuntimeError("failed")
        wrapped.__cause__ = OutOfMemoryError()
        torch_on_a_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        for error in (MemoryError(), OSError(5, "I/O"), OutOfMemoryError(), OverloadError(), wrapped, torch_on_a_cpu):
            assert is_shortage(error)
        for other in (ValueError("out of memory"), RuntimeError("shapes"), KeyError("MemoryError")):
            assert not is_shortage(other)

    def test_a_circle_of_causes_has_an_end(self) -> None:
        own, first, second = ValueError(), ValueError(), KeyError()
        own.__cause__, first.__cause__, second.__cause__ = own, second, first
        assert list(islice(_causes(own), 9)) == [own]
        assert list(islice(_causes(first), 9)) == [first, second]
        assert not is_shortage(own) and not is_shortage(first)

    async def test_policies_observers_and_lengths_that_fail_stop_nothing(self, caplog: Any) -> None:
        class Broken:
            def size(self, backlog: Any) -> int:
                raise ZeroDivisionError("secret")

            def learn(self, size: int, seconds: float) -> None:
                raise ZeroDivisionError("secret")

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError("secret")

        for joins in (True, False):
            async with plain_server(
                joins=joins,
                batching=Broken(),
                searching=Broken(),
                observer=broken,
                kv=broken,
                kv_limit=5,
                lengths=broken,
            ) as server:
                answers = await asyncio.gather(*(server.run(question(number)) for number in range(6)))
                assert len({answer.text for answer in answers}) == 6
        assert "ZeroDivisionError" in caplog.text and "secret" not in caplog.text

    async def test_a_retrieval_that_breaks_its_contract(self) -> None:
        """Yields a place twice, one that is none, nothing for another; is cancelled from within."""

        class Wild:
            cancelled = 0

            async def search_batch(self, tasks: Any) -> AsyncGenerator[Any, None]:
                if self.cancelled:
                    self.cancelled -= 1
                    raise asyncio.CancelledError
                for place, task in enumerate(tasks):
                    if "2" in task.question.text:
                        continue
                    yield place, [task.question.text]
                    yield place, ["another"]
                    yield 99, ["nobody"]

        wild = Wild()
        async with DecoupledServer(wild, PlainPrompts(), SlowEngine()) as server:
            outcomes = await asyncio.gather(*(server.run(question(n)) for n in range(4)), return_exceptions=True)
            for number in (0, 1, 3):
                assert outcomes[number].documents == [f"question {number}"]  # type: ignore[union-attr]
            assert isinstance(outcomes[2], RuntimeError) and "without documents" in str(outcomes[2])
            wild.cancelled = 1
            with pytest.raises(RuntimeError, match="cancelled"):
                await server.run(question(1))
            assert (await server.run(question(1))).documents == ["question 1"]
