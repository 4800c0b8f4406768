"""Pipeline for synchronous callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, Self, TypeVar

from ragorder.pipelining.pipeline import Pipeline, PipelinedStream
from ragorder.pipelining.protocols import PipelineTrace, Usage

__all__ = ["SyncPipeline", "SyncStream"]

Q = TypeVar("Q")
T = TypeVar("T")


class SyncPipeline(Generic[Q]):
    """Runs a pipeline in an event loop on its own thread. Thread-safe, a context manager.

        with SyncPipeline(make) as pipeline:
            print(pipeline.answer(question).text)

    `make` is called on that thread: clients that belong to an event loop are made there.
    """

    def __init__(self, make: Callable[[], Pipeline[Q, Any, Any]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ragorder-pipeline", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._pipeline = self._run(_call(make))
        except BaseException:
            self.close()
            raise

    def stream(self, question: Q) -> SyncStream:
        return SyncStream(self._run(_call(lambda: self._pipeline.stream(question))), self._run)

    def answer(self, question: Q) -> SyncStream:
        with self.stream(question) as stream:
            for _ in stream:
                pass
        return stream

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise RuntimeError("this pipeline is closed")
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    async def _end(self) -> None:
        if hasattr(self, "_pipeline"):
            await self._pipeline.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


class SyncStream(Iterator[str]):
    """`PipelinedStream` for synchronous callers."""

    def __init__(self, stream: PipelinedStream, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self._stream = stream
        self._run = run

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def usage(self) -> Usage | None:
        return self._stream.usage

    @property
    def trace(self) -> PipelineTrace:
        return self._stream.trace

    def __next__(self) -> str:
        piece: str | None = self._run(_next(self._stream))
        if piece is None:
            raise StopIteration
        return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._stream.close())


async def _call(make: Callable[[], T]) -> T:
    return make()


async def _next(stream: PipelinedStream) -> str | None:
    return await anext(stream, None)
