"""Batches that fail get smaller, memory is relieved, and what runs goes on where it was."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from support.decoupled import expected, picky, plain_server, retrieval_of, server_on
from support.inside import file_of
from support.workflow_server import SlowEngine, answer_of, asking, broken, embed, question
from support.workflows import Asked

from ragorder.pipelining import AnswerChunk, PartitionedSearch, Usage
from ragorder.pipelining.batching import AllWaiting, AnswerChangedError, is_shortage


@pytest.fixture
def search(path: Path) -> Any:
    with PartitionedSearch(path, 5, resident=1, cores=1) as search:
        yield search


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
            answers = await asyncio.gather(*asking(server, *range(40)))
            assert len({answer.text for answer in answers}) == 40 and engine.failures
            assert max(answer.trace.failures for answer in answers) <= 4
            limit = server.generating.degradation.limit
            assert limit is not None and limit <= 4
            engine.most = 99
            for _ in range(12):
                await asyncio.gather(*asking(server, *range(40)))
            # It has grown back.
            assert server.generating.degradation.limit >= 16

    async def test_then_memory_is_relieved_and_then_the_request_ends_with_its_error(self) -> None:
        engine = OneFailure(MemoryError("secret"), 0)
        relief = Relieving(engine, 1)
        failing: Any = [SimpleNamespace(relieve=broken), SimpleNamespace(relieve=lambda: next(iter(())))]
        async with asyncio.timeout(60), plain_server(engine, reliefs=[*failing, relief]) as server:
            assert (await server.run(question())).trace.failures == 1 and relief.calls == 1
            assert [event.event for event in server.trace if event.event == "relieved"] == ["relieved"]
            engine.most = -1
            with pytest.raises(MemoryError):
                await server.run(question())
            # The first try and two more.
            assert engine.failures == 4
            engine.most = 99
            await server.run(question())

    async def test_memory_is_relieved_only_when_it_is_short(self) -> None:
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
            await asyncio.gather(*asking(server, *range(8)))
        assert len(engine.sent) > 8
        last_try = {request.question.text: place for place, request in enumerate(engine.sent)}
        assert sorted(last_try, key=last_try.__getitem__) == [f"question {number}" for number in range(8)]

    @pytest.mark.parametrize("again", ["one two three four", "one too three four"])
    async def test_a_stream_that_failed_in_the_middle_goes_on_where_it_was(self, again: str) -> None:
        """Unless the next answer begins otherwise."""

        class Flaky(SlowEngine):
            tries = 0

            async def stream(self, request: Asked, /) -> AsyncGenerator[AnswerChunk, None]:
                self.tries += 1
                if self.tries == 1:
                    yield AnswerChunk("one ")
                    yield AnswerChunk("two ")
                    raise MemoryError
                for word in again.split():
                    yield AnswerChunk(f"{word} ")
                yield AnswerChunk("", Usage(1, 0, 4, "stop"))

        shown: list[str] = []
        async with plain_server(Flaky()) as server:
            with suppress(AnswerChangedError):
                async with server.stream(question()) as stream:
                    async for piece in stream:
                        shown.append(piece)  # noqa: PERF401 (up to the error)
            if "two" in again:
                assert shown == ["one ", "two ", "three ", "four "]
                assert stream.answer is not None and stream.answer.text == "one two three four "
            else:
                assert shown == ["one ", "two "] and stream.answer is None
            assert (await server.run(question())).text == f"{again} "

    @pytest.mark.parametrize("stops", [False, True])
    async def test_a_question_that_fails_its_batch_ends_alone(self, search: Any, index: Any, stops: bool) -> None:
        def stopping(questions: Any) -> Any:
            return embed(questions) if all("13" not in each.text for each in questions) else next(iter(()))

        async with asyncio.timeout(60), server_on(retrieval_of(search, stopping if stops else picky)) as server:
            outcomes: list[Any] = await asyncio.gather(*asking(server, *range(30)), return_exceptions=True)
        assert isinstance(outcomes.pop(13), RuntimeError if stops else ValueError)
        assert [each.text for each in outcomes] == expected(index, *range(13), *range(14, 30))

    async def test_a_search_that_failed_goes_on_where_it_was(self, path: Path, whole_index: Any) -> None:
        with PartitionedSearch(path, 5, nprobe=10, cores=1, read_ahead=False) as search:
            read, reads = file_of(search).read, []

            def failing(partition: int) -> Any:
                reads.append(partition)
                if len(reads) in (3, 5, 6):
                    raise OSError("the disk")
                return read(partition)

            file_of(search).read = failing  # type: ignore[method-assign]
            async with server_on(search) as server:
                answer = await server.run(question())
                assert server.retrieving.degradation.limit is None or server.retrieving.degradation.limit >= 1
        assert reads == [0, 1, 2, 2, 3, 3, 3, 4] and answer.trace.failures == 3
        assert [answer.text] == expected(whole_index, 0)

    async def test_a_request_cancelled_while_its_search_is_resumed_mixes_up_no_other(
        self, search: Any, index: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its checkpoint goes with it, before the thread has begun."""
        tasks = [SimpleNamespace(question=question(n), checkpoint=None, abandoned=False) for n in range(5)]
        for task in (tasks[1], tasks[3]):
            passing = search.search(embed([task.question]), 3)
            next(passing)
            task.checkpoint = passing.rows.part([0])

        async def busy(function: Any, *arguments: Any) -> Any:
            await asyncio.sleep(0)
            tasks[1].checkpoint, tasks[1].abandoned = None, True
            return function(*arguments)

        monkeypatch.setattr(asyncio, "to_thread", busy)
        results = retrieval_of(search).search_batch(tasks)  # type: ignore[arg-type]
        found = {place: documents async for place, documents in results}
        assert found == {place: answer_of(index, tasks[place].question)[0] for place in (0, 2, 3, 4)}

    async def test_a_disk_that_is_gone_ends_the_request(self, search: Any) -> None:
        def gone(partition: int) -> Any:
            raise OSError("the disk")

        file_of(search).read = gone  # type: ignore[method-assign]
        async with server_on(search) as server:
            with pytest.raises(OSError, match="the disk"):
                await server.run(question())

    def test_what_counts_as_a_shortage(self) -> None:
        class OutOfMemoryError(RuntimeError):
            pass

        class OverloadError(Exception):
            status_code = 503

        wrapped, first, second = RuntimeError("failed"), ValueError(), KeyError()
        wrapped.__cause__ = OutOfMemoryError()
        torch_on_a_cpu = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        for error in (MemoryError(), OSError(5, "I/O"), OutOfMemoryError(), OverloadError(), wrapped, torch_on_a_cpu):
            assert is_shortage(error)
        # A circle of causes has an end.
        first.__cause__, second.__cause__ = second, first
        for other in (ValueError("out of memory"), RuntimeError("shapes"), KeyError("MemoryError"), first):
            assert not is_shortage(other)

    @pytest.mark.parametrize("joins", [True, False])
    async def test_policies_observers_and_lengths_that_fail_stop_nothing(self, joins: bool, caplog: Any) -> None:
        policy = SimpleNamespace(size=broken, learn=broken)
        options: dict[str, Any] = {"batching": policy, "searching": policy, "observer": broken}
        options |= {"kv": broken, "kv_limit": 5, "lengths": broken}
        async with plain_server(joins=joins, **options) as server:
            answers = await asyncio.gather(*asking(server, *range(6)))
        assert len({answer.text for answer in answers}) == 6
        assert "InjectedError" in caplog.text and "secret" not in caplog.text

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
        async with server_on(wild) as server:
            outcomes: list[Any] = await asyncio.gather(*asking(server, *range(4)), return_exceptions=True)
            refused = outcomes.pop(2)
            assert isinstance(refused, RuntimeError) and "without documents" in str(refused)
            assert [each.documents for each in outcomes] == [[f"question {number}"] for number in (0, 1, 3)]
            wild.cancelled = 1
            with pytest.raises(RuntimeError, match="cancelled"):
                await server.run(question(1))
            assert (await server.run(question(1))).documents == ["question 1"]
