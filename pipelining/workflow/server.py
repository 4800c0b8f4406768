"""Server of many workflows that share engine and search (HedraRAG 4.5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Self, Unpack

from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.protocols import AnswerChunk, D, R, RequestBuilder, StreamingEngine
from ragorder.pipelining.reordering import CacheAwareQueue, ConcurrencyLimiter
from ragorder.pipelining.servers import FirstFailures, end_all, run_batch
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.nodes import DeadlineError, NodeId, NodeQuestion
from ragorder.pipelining.workflow.pricing import EXTRA_TOKENS, Spending
from ragorder.pipelining.workflow.result import AnswerText, WorkflowResult, WorkflowStream, WorkflowTrace
from ragorder.pipelining.workflow.run import RunOptions, WorkflowRun, checked_options, deadline_error
from ragorder.pipelining.workflow.searching import Searcher
from ragorder.pipelining.workflow.speculations import Workers
from ragorder.pipelining.workflow.transformations import Transformation, all_transformations
from ragorder.pipelining.workflow.wavefront import Measurements, Wavefront

_MEASURE_EVERY = 128
"""Of answers whose tokens nobody reads, one in this many is streamed, to measure the prefill."""


class _BoundedEngine(Generic[R]):
    """Aborted requests count until they end."""

    def __init__(self, engine: StreamingEngine[R], limit: int) -> None:
        self._engine = engine
        self._limiter: ConcurrencyLimiter[None] = ConcurrencyLimiter(limit, CacheAwareQueue(window=0))

    async def stream(self, request: R, /) -> AsyncGenerator[AnswerChunk, None]:
        async with self._limiter.slot(None), aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk


class WorkflowServer(Generic[D, R]):
    """Runs workflows of many requests at once. For one event loop.

        async with WorkflowServer(engine, ContinuousIVF(index), embed, documents.__getitem__, prompts) as server:
            result = await server.run(graph, "Which drawer?")
            async with server.stream(graph, "Which drawer?") as stream: ...

    - `search`, `embed`, `document`: see `Searcher`; `document` must be quick
    - `transformations`: of each scheduling cycle, in this order (None: all)
    - `load`: admits speculative generations (None: `EngineLoad(4)`)
    - `extra_tokens`: share of engine tokens, engine requests and searches that wrong speculations may add to those of
      due nodes (None: any; 0: only searches whose queries are known)
    - `max_requests` run at once and `max_waiting` others wait; further ones raise QueueFullError
    - `max_generations` are on the engine at once; the largest cached share goes next, within `window`
    - `memo`: a request repeats no search, and no generation at temperature 0 (None) or at any (True); False: it does
    - `observer`: gets each final trace

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
        memo: bool | None = None,
        observer: Callable[[WorkflowTrace], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.transformations = all_transformations() if transformations is None else tuple(transformations)
        self.wavefront = Wavefront(self._wake, max_generations, window)
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
        self._memo = memo
        self._observer = observer
        self._clock = clock
        self._running: set[asyncio.Task[WorkflowResult]] = set()
        self._whole = 0
        self._awake = False
        self._closed = False
        self._warn = FirstFailures()

    async def run(self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]) -> WorkflowResult:
        """Raises GraphError, NodeError, DeadlineError, QueueFullError, RuntimeError (closed)."""
        return await self._run(graph, question, WorkflowTrace(graph.name), checked_options(graph, options))

    def stream(self, graph: CompiledGraph, question: str, **options: Unpack[RunOptions]) -> WorkflowStream:
        trace = WorkflowTrace(graph.name)
        return WorkflowStream(self._stream(graph, question, trace, checked_options(graph, options)), trace)

    def batch(
        self,
        graph: CompiledGraph,
        questions: Iterable[str],
        *,
        on_progress: Callable[[int], object] | None = None,
        **options: Unpack[RunOptions],
    ) -> AsyncGenerator[tuple[int, WorkflowResult | Exception], None]:
        """Yield (number of the question, result or error) as requests end. At most `max_requests` questions are read at
        a time, and wait while the queue is full."""
        checked_options(graph, options)

        def ask(question: str) -> Coroutine[Any, Any, WorkflowResult]:
            return self._run(graph, question, WorkflowTrace(graph.name), options, patient=True)

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
        begun = graph.begin(question, options.get("state"))
        if self._closed:
            raise RuntimeError("this server is closed")
        came_s, deadline_s = self._clock(), options.get("deadline_s")
        ends_s = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s

        async def course() -> WorkflowResult:
            async with asyncio.timeout_at(ends_s) as waiting, self._limiter.slot(None, patient=patient):
                # From here on the run watches its deadline itself.
                waiting.reschedule(None)
                trace.started_s = self._clock()
                trace.waited_s = trace.started_s - came_s
                run = WorkflowRun(
                    self._workers,
                    graph,
                    begun,
                    options,
                    trace,
                    emit,
                    streams=self._streams,
                    memo=self._memo,
                    ends_s=ends_s,
                )
                result = graph.result(await run.run(), trace, options.get("until"))
                trace.outcome = "limited" if run.limited else "answered"
                return result

        task = asyncio.create_task(course())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        trace.started_s, trace.outcome = came_s, "failed"
        try:
            return await task
        except TimeoutError as error:
            raise error if isinstance(error, DeadlineError) else deadline_error(graph, options) from None
        except asyncio.CancelledError:
            trace.outcome = "cancelled"
            caller = asyncio.current_task()
            if self._closed and (caller is None or not caller.cancelling()):
                raise RuntimeError("the server was closed before this request ended") from None
            raise
        finally:
            trace.total_s = self._clock() - trace.started_s
            if self._observer is not None:
                self._warn.guard("observer", self._observer, trace)

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

    def _streams(self, graph: CompiledGraph, id: NodeId) -> bool:
        for transformation in self.transformations:
            reads_tokens = getattr(transformation, "reads_tokens", None)
            if reads_tokens is None:
                return True
            reads = self._warn.guard(transformation.name, reads_tokens, graph, id, self.measurements)
            # One that fails may read them.
            if reads or reads is None:
                return True
        if not self.transformations:
            return False
        self._whole += 1
        return self.measurements.prefill_s is None or self._whole % _MEASURE_EVERY == 0

    def _wake(self) -> None:
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._cycle)

    def _cycle(self) -> None:
        self._awake = False
        self.cycles += 1
        for transformation in self.transformations:
            self._warn.guard(transformation.name, transformation.apply, self.wavefront, self.measurements)
        for item in self.wavefront.take():
            item.request.start(item)
        if self.wavefront.next_may_start:
            self._wake()
