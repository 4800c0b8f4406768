"""One request's course through its graph."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ragorder.pipelining.protocols import EngineRequest, Usage
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.servers import wait_for_end
from ragorder.pipelining.workflow.execution import answered, call_step, documents_of, found, query_of
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.join import NodeRun, Tokens
from ragorder.pipelining.workflow.nodes import END, Generation, NodeError, Retrieval, State
from ragorder.pipelining.workflow.result import Outcome, WorkflowTrace, WorkItemTrace
from ragorder.pipelining.workflow.searching import Handle
from ragorder.pipelining.workflow.speculations import Speculations, SpeculativeGeneration, Workers, question_for
from ragorder.pipelining.workflow.wavefront import WorkItem, worker_of

if TYPE_CHECKING:
    from ragorder.pipelining.search import History
    from ragorder.pipelining.workflow.searching import Found

__all__ = ["WorkflowRun"]

D = TypeVar("D")
R = TypeVar("R", bound=EngineRequest)

_CHECK_EVERY = 8
"""Tokens of a generation between two scheduling cycles."""


class WorkflowRun(Generic[D, R]):
    """Starts due nodes, and the speculative items of scheduling cycles.

    `emit` is called with the answer's text as it is generated, if no later node can change it.
    """

    def __init__(
        self,
        workers: Workers[D, R],
        graph: CompiledGraph,
        state: State,
        scope: Hashable,
        trace: WorkflowTrace,
        emit: Callable[[str], None] | None = None,
    ) -> None:
        self.graph = graph
        self.scope = scope
        self.trace = trace
        self._workers = workers
        self._state = state
        self._emit = emit
        self._context = copy_context()
        self._history: History | None = None
        self._results: asyncio.Queue[tuple[WorkItem, Mapping[str, Any] | BaseException]] = asyncio.Queue()
        self._items: set[WorkItem] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._speculations = Speculations(workers, graph, scope, self._elapsed_s, self._begun, self._end)

    async def run(self) -> State:
        """Run the graph to its end. Raises GraphError and NodeError. All work has ended when this returns or raises."""
        self._tokens: Tokens
        try:
            self._tokens = tokens = Tokens(self.graph, self._state)
            while not tokens.done:
                for run in tokens.take():
                    self._add(run)
                self._leave(self._speculations.left(tokens), "wasted")
                item, values = await self._results.get()
                if isinstance(values, BaseException):
                    raise NodeError.of(self.graph.name, item.run.id, values) from values
                tokens.finish(item.run, values)
            self._leave(self._speculations.drop_all("wasted"), "wasted")
            return tokens.state
        finally:
            await self._close()

    @property
    def searches(self) -> int:
        return 0 if self._history is None else len(self._history)

    def predicted_runs(self, item: WorkItem, /) -> list[NodeRun]:
        return self._context.copy().run(self._speculations.predicted_runs, self._tokens, item)

    def known_runs(self) -> list[NodeRun]:
        return self._context.copy().run(self._speculations.known_runs, self._tokens)

    def is_speculated(self, item: WorkItem, /) -> bool:
        return self._context.copy().run(self._speculations.is_speculated, item)

    def lengths(self, item: WorkItem, /) -> Callable[[], CachedLengths] | None:
        node, predict = item.node, getattr(self._workers.prompts, "lengths", None)
        if predict is None or not isinstance(node, Generation):
            return None

        def lengths() -> Any:
            return predict(question_for(item, node, self.scope), documents_of(node, item.run.state))

        try:
            found: Callable[[], CachedLengths] | None = self._context.copy().run(lengths)
        except Exception:
            # The generation raises the error itself.
            return None
        return found

    def start(self, item: WorkItem, /) -> None:
        # A scheduling cycle runs in the context of one of the requests, not necessarily this one.
        self._context.copy().run(self._start, item)

    def _start(self, item: WorkItem) -> None:
        if item.after is None:
            self._begun(item)
            self._spawn(self._work(item), self._working)
            return
        item.trace.planned_s = self._elapsed_s()
        try:
            self._speculations.begin(item, item.after, self._branched)
        except Exception:
            # The functions of the graph have seen only part of a text.
            self._end(item, "cancelled")

    def _elapsed_s(self) -> float:
        return self._workers.clock() - self.trace.started_s

    def _add(self, run: NodeRun) -> None:
        self.trace.rounds[run.id] = self.trace.rounds.get(run.id, 0) + 1
        item = WorkItem(self, run, WorkItemTrace(run.id, "due", worker_of(run.node), self._elapsed_s()))
        self._items.add(item)
        self._workers.wavefront.add(item)

    def _begun(self, item: WorkItem) -> None:
        item.trace.started_s = self._elapsed_s()
        self.trace.add(item.trace)

    def _end(self, item: WorkItem, outcome: Outcome) -> None:
        self._items.discard(item)
        self._workers.wavefront.end(item, outcome, self._elapsed_s())

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _leave(self, generations: list[SpeculativeGeneration[D, R]], outcome: Outcome) -> None:
        for generation in generations:
            self._spawn(generation.leave(outcome), self._leaving)

    async def _close(self) -> None:
        for item in tuple(self._items):
            self._end(item, "cancelled")
        # Generations in `_leaving` are not cancelled: they wait until the engine has ended their requests.
        for task in self._working:
            task.cancel()
        self._leave(self._speculations.drop_all("cancelled"), "cancelled")
        await wait_for_end(lambda: self._working | self._leaving | self._speculations.tasks)

    async def _work(self, item: WorkItem) -> None:
        values: Mapping[str, Any] | BaseException
        try:
            if isinstance(item.node, Generation):
                values = await self._generate(item, item.node)
            elif isinstance(item.node, Retrieval):
                values = await self._retrieve(item, item.node)
            else:
                values = await call_step(item.node, item.run.state)
        except asyncio.CancelledError as error:
            if item.ended:
                raise
            # The request was not cancelled, but something that the node awaits.
            values = error
        except Exception as error:
            values = error
        self._end(item, "failed" if isinstance(values, BaseException) else "used")
        self._results.put_nowait((item, values))

    async def _retrieve(self, item: WorkItem, node: Retrieval) -> Mapping[str, Any]:
        measured, searcher = self._workers.measured, self._workers.searcher
        query = query_of(node, item.run.state)
        handle, history = await self._speculations.search(item, query)
        if history is not None:
            self._history = history
        started_s = self._elapsed_s()
        near = self.searches > 0
        if handle is None:
            vector = await searcher.vector(query)
            item.trace.embed_s = self._elapsed_s() - started_s
            measured.embed_s.add(item.trace.embed_s)
            started_s = self._elapsed_s()
            if self._history is None and item.reorder:
                self._history = searcher.history()
            # Results of a speculative search are used in any case.
            past = self._history if item.reorder or history is not None else None
            handle = searcher.submit(vector, node.topk, history=past, split=item.split, fast=item.fast)
            stage = await self._stages(item, handle)
            measured.search_s.add(self._elapsed_s() - started_s)
        else:
            stage = await self._stages(item, handle)
        item.trace.clusters, item.trace.settled = stage.number, stage.settled
        (measured.settled_near if near else measured.settled).add(1 - stage.settled / max(1, stage.stages))
        return found(node, searcher.documents(stage))

    async def _stages(self, item: WorkItem, handle: Handle) -> Found:
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            async with aclosing(handle.stages_async()) as stages:
                async for stage in stages:
                    item.stage = stage
                    item.trace.stages += 1
                    ids = stage.ids.tobytes()
                    if stage.final:
                        break
                    seen[item.part] = ids, self._elapsed_s()
                    if ids != item.speculated:
                        self._workers.wavefront.progress(item)
        finally:
            handle.cancel()
        if seen:
            now_s = self._elapsed_s()
            rights = [(before == ids, now_s - at_s) for before, at_s in seen.values()]
            self._workers.measured.odds(item).learn(rights, seen)
        return stage

    async def _generate(self, item: WorkItem, node: Generation) -> Mapping[str, Any]:
        speculative = self._speculations.generation(item.run)
        try:
            usage = await self._answer(item, node, speculative)
        finally:
            if not speculative.idle:
                self._leave([speculative], "rolled back")
        self._note_usage(item, usage)
        return answered(node, "".join(item.text), item.run.state)

    async def _answer(self, item: WorkItem, node: Generation, speculative: SpeculativeGeneration[D, R]) -> Usage | None:
        emit = self._emit if self._emit is not None and self._is_answer(item, node) else None
        usage: Usage | None = None
        started_s = self._elapsed_s()
        question, documents = question_for(item, node, self.scope), documents_of(node, item.run.state)
        async with aclosing(speculative.attempt.answer(question, documents)) as chunks:
            async for chunk in chunks:
                if item.trace.first_token_s is None:
                    item.trace.first_token_s = self._elapsed_s()
                    speculative.used(right=speculative.right)
                usage = chunk.usage or usage
                if not chunk.text:
                    continue
                item.text.append(chunk.text)
                before, item.tokens = item.tokens, item.tokens + chunk.tokens
                if emit is not None:
                    emit(chunk.text)
                if item.tokens // _CHECK_EVERY > before // _CHECK_EVERY:
                    self._workers.wavefront.progress(item)
        if not speculative.right:
            now_s, first_s = self._elapsed_s(), item.trace.first_token_s
            self._workers.measured.generated(item, now_s - started_s, None if first_s is None else now_s - first_s)
        return usage

    def _note_usage(self, item: WorkItem, usage: Usage | None) -> None:
        measured = self._workers.measured
        item.trace.tokens = item.tokens
        if usage is not None:
            item.trace.tokens = usage.completion_tokens or item.tokens
            item.trace.prompt_tokens, item.trace.cached_tokens = usage.prompt_tokens, usage.cached_tokens
            if item.ordered and usage.prompt_tokens and usage.cached_tokens is not None:
                measured.cached_share.add(usage.cached_tokens / usage.prompt_tokens)
        measured.pay(item)

    def _is_answer(self, item: WorkItem, node: Generation) -> bool:
        graph, others = self.graph, [run.id for run in self._tokens.running if run != item.run]
        later = {vertex for id in others for vertex in (id, *graph.topology.later(id)) if vertex is not END}
        return (
            node.parse is None
            and node.output == graph.answer
            and not graph.next_nodes(node.id)
            and not any(graph.answer in graph.nodes[id].writes for id in later)
        )

    def _branched(self) -> History | None:
        if self._history is None:
            return self._workers.searcher.history()
        return self._history.branch()
