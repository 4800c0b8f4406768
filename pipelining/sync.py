"""Pipeline for synchronous callers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, Self, TypeVar

from ragorder.pipelining.loop_thread import LoopThread
from ragorder.pipelining.pipeline import Pipeline, PipelinedStream
from ragorder.pipelining.protocols import PipelineTrace, Q, Usage

T = TypeVar("T")


class SyncPipeline(Generic[Q]):
    """A pipeline in an event loop on its own thread. Thread-safe.

        with SyncPipeline(make) as pipeline:
            print(pipeline.answer(question).text)

    `make` is called on that thread: an event loop's clients must be made there.
    """

    def __init__(self, make: Callable[[], Pipeline[Q, Any, Any]]) -> None:
        self._thread = LoopThread("this pipeline")
        try:
            self._pipeline = self._thread.run(_call(make))
        except BaseException:
            self._thread.close()
            raise

    def stream(self, question: Q) -> SyncStream:
        return SyncStream(self._thread.run(_call(lambda: self._pipeline.stream(question))), self._thread.run)

    def answer(self, question: Q) -> SyncStream:
        with self.stream(question) as stream:
            for _ in stream:
                pass
        return stream

    def close(self) -> None:
        self._thread.close(self._pipeline.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
