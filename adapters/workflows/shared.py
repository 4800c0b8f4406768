"""Workflow server shared by callers of any thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Self, TypeVar, Unpack

from ragorder.pipelining.loop_thread import LoopThread
from ragorder.pipelining.workflow import CompiledGraph, RunOptions, WorkflowResult, WorkflowServer, WorkflowStream

T = TypeVar("T")


class SharedWorkflows:
    """Workflow server in an event loop on its own thread. Thread-safe.

        with SharedWorkflows(lambda: ordered_workflows(engine, search, embed, document, **parts)) as workflows:
            print(workflows.run(graph, "Which drawer?").text)

    `make` is called on that thread: an event loop's clients must be made there. `arun` is for callers with their own
    loop. Once closed, it raises RuntimeError.
    """

    def __init__(self, make: Callable[[], WorkflowServer[Any, Any]]) -> None:
        self._thread = LoopThread("the shared workflow server")
        try:
            self._server = self._thread.run(_call(make))
        except BaseException:
            self._thread.close()
            raise

    def run(self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]) -> WorkflowResult:
        """Raises the server's errors, RuntimeError on the server's own thread."""
        return self._thread.run(self._server.run(graph, question, **options))

    async def arun(self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]) -> WorkflowResult:
        return await self._thread.arun(self._server.run(graph, question, **options))

    def stream(
        self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]
    ) -> Iterator[str | WorkflowResult]:
        """Yield the answer's text as it is generated, then the result. Closing early ends the request."""
        stream = self._server.stream(graph, question, **options)
        try:
            while (piece := self._thread.run(_next(stream))) is not None:
                yield piece
        finally:
            self._thread.run(stream.close())

    async def astream(
        self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]
    ) -> AsyncIterator[str | WorkflowResult]:
        stream = self._server.stream(graph, question, **options)
        try:
            while (piece := await self._thread.arun(_next(stream))) is not None:
                yield piece
        finally:
            await self._thread.arun(stream.close())

    def close(self) -> None:
        self._thread.close(self._server.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(stream: WorkflowStream) -> str | WorkflowResult | None:
    async for text in stream:
        return text
    result, stream.result = stream.result, None
    return result


async def _call(make: Callable[[], T]) -> T:
    return make()
