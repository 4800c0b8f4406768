"""Server of many workflows that share engine and search (HedraRAG section 4.5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, Self, TypedDict, TypeVar, Unpack

from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.protocols import AnswerChunk, EngineRequest, RequestBuilder, StreamingEngine
from ragorder.pipelining.reordering import CacheAwareQueue, ConcurrencyLimiter
from ragorder.pipelining.servers import FirstFailures, end_all, run_batch
from ragorder.pipelining.workflow.graph import CompiledGraph, checked_graph
from ragorder.pipelining.workflow.nodes import NodeQuestion
from ragorder.pipelining.workflow.pricing import EXTRA_TOKENS, Spending
from ragorder.pipelining.workflow.result import AnswerText, WorkflowResult, WorkflowStream, WorkflowTrace
from ragorder.pipelining.workflow.run import WorkflowRun
from ragorder.pipelining.workflow.searching import Searcher
from ragorder.pipelining.workflow.speculations import Workers
from ragorder.pipelining.workflow.transformations import Transformation, all_transformations
from ragorder.pipelining.workflow.wavefront import EngineQueue, Measurements, Wavefront

__all__ = ["RunOptions", "WorkflowServer", "checked_options"]

D = TypeVar("D")
R = TypeVar("R", bound=EngineRequest)


class _BoundedEngine(Generic[R]):
    """An engine with at most `limit` requests at once, including aborted ones until they have ended."""

    def __init__(self, engine: StreamingEngine[R], limit: int) -> None:
        self._engine = engine
        self._limiter: ConcurrencyLimiter[None] = ConcurrencyLimiter(limit, CacheAwareQueue(window=0))

    async def stream(self, request: R, /) -> AsyncGenerator[AnswerChunk, None]:
        async with self._limiter.slot(None), aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class RunOptions(TypedDict, total=False):
    """`state`: values for the graph's `inputs`; `scope`: the tenant, which shares no cached prefixes."""

    state: Mapping[str, Any] | None
    scope: Hashable


def checked_options(options: RunOptions) -> RunOptions:
    """Raise TypeError for unknown options: with a misspelt scope a request would share others' prefixes."""
    unknown = options.keys() - RunOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"a request has no {', '.join(sorted(unknown))}: its options are state and scope")
    return options


class WorkflowServer(Generic[D, R]):
    """Runs workflows of many requests at once. For one event loop.

        async with WorkflowServer(engine, ContinuousIVF(index), embed, documents.__getitem__, prompts) as server:
            result = await server.run(graph, "Which drawer?")
            async with server.stream(graph, "Which drawer?") as stream: ...
            async for number, result in server.batch(graph, questions): ...

    - `search`, `embed`, `document`: see `Searcher`; `document` must be quick
    - `transformations`: of each scheduling cycle, in this order (None: all; (): none)
    - `load`: admits speculative generations (None: while fewer than 4 requests wait for their first token)
    - `extra_tokens`: engine tokens that wrong speculations may take, as a share of what is taken stage by stage; the
      same share of engine requests and searches (None: any number; 0: only searches whose queries are known)
    - `max_requests` run at once and `max_waiting` others wait; further ones raise QueueFullError
    - `max_generations` are on the engine at once; the largest cached share goes next, within `window`
    - `observer`: called with each final trace

    Answers equal those of `interpret` with the same prompts. A node that fails ends its own request only.
    """

    def __init__(
        self,
        engine: StreamingEngine[R],
        search: Any,
        embed: Callable[[str], Any] | None,
        document: Callable[[Any], D] | None,
        prompts: RequestBuilder[NodeQuestion, D, R],
        *,
        transformations: Sequence[Transformation] | None = None,
        load: EngineLoad | None = None,
        extra_tokens: float | None = EXTRA_TOKENS,
        max_requests: int = 64,
        max_waiting: int = 1024,
        max_generations: int | None = None,
        window: int = 32,
        observer: Callable[[WorkflowTrace], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.transformations = all_transformations() if transformations is None else tuple(transformations)
        self.wavefront = Wavefront(self._wake, EngineQueue(max_generations, window))
        self.spending = Spending(extra_tokens)
        self.measurements = Measurements(load or EngineLoad(4, clock=clock), self.wavefront, search, self.spending)
        self.cycles = 0
        searcher = Searcher(search, embed, document)
        if max_generations is not None:
            engine = _BoundedEngine(engine, max_generations)
        self._workers = Workers(engine, prompts, searcher, self.measurements, self.wavefront, clock)
        self._limiter: ConcurrencyLimiter[None] = ConcurrencyLimiter(
            max_requests, CacheAwareQueue(window=0), max_waiting=max_waiting
        )
        self._observer = observer
        self._clock = clock
        self._running: set[asyncio.Task[WorkflowResult]] = set()
        self._awake = False
        self._closed = False
        self._warn = FirstFailures()

    async def run(self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]) -> WorkflowResult:
        """Return the result. Raises GraphError, NodeError, QueueFullError, and RuntimeError if closed.

        Cancelling it ends its work.
        """
        return await self._run(graph, question, WorkflowTrace(graph.name), checked_options(options))

    def stream(self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]) -> WorkflowStream:
        trace = WorkflowTrace(graph.name)
        return WorkflowStream(self._stream(graph, question, trace, checked_options(options)), trace)

    def batch(
        self,
        graph: CompiledGraph,
        questions: Iterable[str],
        *,
        scope: Hashable = None,
        on_progress: Callable[[int], object] | None = None,
    ) -> AsyncGenerator[tuple[int, WorkflowResult | Exception], None]:
        """Yield (number of the question, result or error) in the order of their ends.

        At most `max_requests` questions are read at a time; they wait while the queue is full.
        """

        def ask(question: str) -> Coroutine[Any, Any, WorkflowResult]:
            return self._run(graph, question, WorkflowTrace(graph.name), {"scope": scope}, patient=True)

        return run_batch(questions, ask, at_once=self._limiter.limit, on_progress=on_progress)

    async def close(self) -> None:
        """End all requests with RuntimeError. Engine and search stay open."""
        self._closed = True
        await end_all(self._running)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(
        self,
        graph: CompiledGraph,
        question: str,
        trace: WorkflowTrace,
        options: RunOptions,
        emit: Callable[[str], None] | None = None,
        *,
        patient: bool = False,
    ) -> WorkflowResult:
        begun = checked_graph(graph).begin(question, options.get("state"))
        if self._closed:
            raise RuntimeError("this server is closed")
        came_s = self._clock()

        async def course() -> WorkflowResult:
            async with self._limiter.slot(None, patient=patient):
                trace.started_s = self._clock()
                trace.waited_s = trace.started_s - came_s
                run = WorkflowRun(self._workers, graph, begun, options.get("scope"), trace, emit)
                return WorkflowResult.of(graph, await run.run(), trace)

        task = asyncio.create_task(course())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        trace.started_s, trace.outcome = came_s, "failed"
        try:
            result = await task
            trace.outcome = "answered"
            return result
        except asyncio.CancelledError:
            trace.outcome = "cancelled"
            caller = asyncio.current_task()
            if self._closed and (caller is None or not caller.cancelling()):
                raise RuntimeError("the server was closed before this request ended") from None
            raise
        finally:
            trace.total_s = self._clock() - trace.started_s
            self._observe(trace)

    async def _stream(
        self, graph: CompiledGraph, question: str, trace: WorkflowTrace, options: RunOptions
    ) -> AsyncGenerator[str | WorkflowResult, None]:
        chunks: asyncio.Queue[str | None] = asyncio.Queue()
        text = AnswerText()
        task = asyncio.create_task(self._run(graph, question, trace, options, chunks.put_nowait))
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                if shown := text.add(chunk):
                    yield shown
            result = await task
            if not text.began and result.text:
                yield result.text
            yield result
        finally:
            await end_all((task,))

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._cycle)

    def _cycle(self) -> None:
        self._awake = False
        self.cycles += 1
        for transformation in self.transformations:
            try:
                transformation.apply(self.wavefront, self.measurements)
            except Exception as error:
                self._warn(transformation.name, error)
        for item in self.wavefront.take():
            item.request.start(item)
        if self.wavefront.next_may_start:
            self._wake()

    def _observe(self, trace: WorkflowTrace) -> None:
        if self._observer is not None:
            try:
                self._observer(trace)
            except Exception as error:
                self._warn("observer", error)
