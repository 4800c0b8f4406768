"""One request's course through its graph."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, Literal, TypedDict

from ragorder.pipelining.protocols import D, R, Usage
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.servers import wait_for_end
from ragorder.pipelining.workflow.execution import Memory, answered, call_step, documents_of, found, input_of, query_of
from ragorder.pipelining.workflow.graph import CompiledGraph, checked_graph
from ragorder.pipelining.workflow.join import Tokens
from ragorder.pipelining.workflow.nodes import (
    END,
    DeadlineError,
    Generation,
    GraphError,
    Node,
    NodeError,
    NodeId,
    NodeRun,
    Retrieval,
    RoundsError,
    State,
    Step,
)
from ragorder.pipelining.workflow.prediction import may_lead_on
from ragorder.pipelining.workflow.result import Outcome, WorkflowTrace, WorkItemTrace
from ragorder.pipelining.workflow.searching import Handle
from ragorder.pipelining.workflow.speculations import Speculations, SpeculativeGeneration, Workers, question_for
from ragorder.pipelining.workflow.wavefront import WorkItem, worker_of

if TYPE_CHECKING:
    from ragorder.pipelining.search import History
    from ragorder.pipelining.workflow.searching import Found

_CHECK_EVERY = 8
"""A generation's tokens between two scheduling cycles."""


class RunOptions(TypedDict, total=False):
    """Options of one request.

    - `state`: values for the graph's `inputs`
    - `scope`: the tenant, which shares no cached prefixes
    - `deadline_s`: seconds from the call, with the time in the queue
    - `on_limit`: at `max_rounds` or the deadline "return" the answer so far, or raise without one; always "raise"
    - `until`: a name of the state: only what leads to its last value runs
    """

    state: Mapping[str, Any] | None
    scope: Hashable
    deadline_s: float | None
    on_limit: Literal["return", "raise"]
    until: str | None


def checked_options(graph: CompiledGraph, options: RunOptions) -> RunOptions:
    """Raise for wrong options: with a misspelt scope a request would share others' prefixes."""
    names = RunOptions.__annotations__
    if unknown := options.keys() - names.keys():
        raise TypeError(f"a request has no {', '.join(sorted(unknown))}: its options are {', '.join(names)}")
    on_limit, deadline_s, until = options.get("on_limit", "return"), options.get("deadline_s"), options.get("until")
    if on_limit not in ("return", "raise"):
        raise ValueError(f"on_limit is {on_limit!r}: give 'return' or 'raise'")
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"deadline_s is {deadline_s!r}: give seconds above 0, or None")
    written = sorted({name for node in checked_graph(graph).nodes.values() for name in node.writes})
    if until is not None and until not in written:
        known = ", ".join(map(repr, written))
        raise GraphError(f"workflow {graph.name!r}: until={until!r} is written by no node: give one of {known}")
    return options


def deadline_error(graph: CompiledGraph, options: RunOptions) -> DeadlineError:
    return DeadlineError(f"workflow {graph.name!r}: no answer within deadline_s={options.get('deadline_s')}")


class WorkflowRun(Generic[D, R]):
    """Starts due nodes and speculative items. `emit` gets the answer's text as it is generated, if no later node can
    change it."""

    def __init__(
        self,
        workers: Workers[D, R],
        graph: CompiledGraph,
        state: State,
        options: RunOptions,
        trace: WorkflowTrace,
        emit: Callable[[str], None] | None = None,
        *,
        streams: Callable[[CompiledGraph, NodeId], bool] = lambda graph, node: True,
        memo: bool | None = None,
        ends_s: float | None = None,
    ) -> None:
        self.graph = graph
        self.scope = scope = options.get("scope")
        self.limited = False
        self.trace = trace
        self._workers = workers
        self._state = state
        self._options = options
        self._ends_s = ends_s
        self._emit = emit
        self._streams = streams
        self._shown: WorkItem | None = None
        self._memory = Memory(memo)
        self._context = copy_context()
        self._history: History | None = None
        self._results: asyncio.Queue[tuple[WorkItem | None, Any]] = asyncio.Queue()
        self._items: set[WorkItem] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._speculations = Speculations(
            workers, graph, scope, self._is_known, self._elapsed_s, self._begun, self._end
        )

    async def run(self) -> State:
        """Run to the graph's end or a limit, and leave no work. Raises GraphError, DeadlineError, NodeError."""
        self._tokens: Tokens
        loop = asyncio.get_running_loop()
        error = deadline_error(self.graph, self._options)
        alarm = None if self._ends_s is None else loop.call_at(self._ends_s, self._results.put_nowait, (None, error))
        try:
            self._tokens = tokens = Tokens(self.graph, self._state, self._options.get("until"))
            while not tokens.done:
                for run in tokens.take():
                    if self._is_needed(run):
                        self._add(run)
                    else:
                        tokens.leave(run)
                self._leave(self._speculations.left(tokens), "wasted")
                if tokens.running:
                    await self._next_result()
            self._leave(self._speculations.drop_all("wasted"), "wasted")
            return tokens.state
        except (RoundsError, DeadlineError):
            state = self._state_so_far()
            if self._options.get("on_limit") == "raise" or (tokens.until or self.graph.answer) not in state:
                raise
            self.limited = True
            return state
        finally:
            if alarm is not None:
                alarm.cancel()
            await self._close()

    async def _next_result(self) -> None:
        item, values = await self._results.get()
        if item is None:
            raise values
        if isinstance(values, BaseException):
            raise NodeError.of(self.graph.name, item.run.id, values) from values
        self._tokens.finish(item.run, values)

    def _is_needed(self, run: NodeRun) -> bool:
        if self._tokens.until is None or not isinstance(run.node, Generation):
            return True
        return may_lead_on(self._tokens, run)

    def _state_so_far(self) -> State:
        """Count what has been shown of an answer as the answer."""
        state = self._tokens.state_so_far
        return state if self._shown is None else state.updated({self.graph.answer: "".join(self._shown.text).strip()})

    @property
    def searches(self) -> int:
        return 0 if self._history is None else len(self._history)

    def predicted_runs(self, item: WorkItem, /) -> list[NodeRun]:
        runs = self._context.copy().run(self._speculations.predicted_runs, self._tokens, item)
        return [run for run in runs if self._is_needed(run)]

    def known_runs(self, item: WorkItem, /) -> list[NodeRun]:
        return self._context.copy().run(self._speculations.known_runs, self._tokens, item.run)

    def is_speculated(self, item: WorkItem, /) -> bool:
        context = self._context.copy()
        return context.run(self._speculations.is_speculated, item) or context.run(self._is_known, item.run)

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
        if isinstance(item.node, Generation):
            item.streamed = self._may_show(item.node) or self._streams(self.graph, item.run.id)
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

    def _is_known(self, run: NodeRun) -> bool:
        if isinstance(run.node, Step):
            return False
        try:
            return self._memory.find(input_of(run.node, run.state, self.scope)) is not None
        except Exception:
            # The node raises the error itself.
            return False

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
            values = await self._values(item, item.node)
        except asyncio.CancelledError as error:
            if item.ended:
                raise
            # The request was not cancelled, but something that the node awaits.
            values = error
        except Exception as error:
            values = error
        self._end(item, "failed" if isinstance(values, BaseException) else "used")
        self._results.put_nowait((item, values))

    async def _values(self, item: WorkItem, node: Node) -> Mapping[str, Any]:
        if isinstance(node, Step):
            return await call_step(node, item.run.state)
        asked = input_of(node, item.run.state, self.scope)
        result: Any
        known = self._memory.find(asked)
        if known is not None:
            item.trace.from_memory = True
            self._leave(self._speculations.drop(item.run.key, "wasted"), "wasted")
            result = await known
            if isinstance(node, Generation) and (emit := self._emit_of(item, node)) is not None:
                emit(result)
        else:
            with self._memory.asking(asked) as known:
                work = self._generate(item, node) if isinstance(node, Generation) else self._retrieve(item, node)
                result = await work
                known.set_result(result)
        return answered(node, result, item.run.state) if isinstance(node, Generation) else found(node, result)

    async def _retrieve(self, item: WorkItem, node: Retrieval) -> tuple[D, ...]:
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
            handle = searcher.submit(vector, node.topk, history=past, split=item.split)
            stage = await self._stages(item, handle)
            measured.search_s.add(self._elapsed_s() - started_s)
        else:
            stage = await self._stages(item, handle)
        item.trace.clusters, item.trace.settled = stage.number, stage.settled
        (measured.settled_near if near else measured.settled).add(1 - stage.settled / max(1, stage.stages))
        return searcher.documents(stage)

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

    async def _generate(self, item: WorkItem, node: Generation) -> str:
        speculative = self._speculations.generation(item.run)
        try:
            usage = await self._answer(item, node, speculative)
        finally:
            if not speculative.idle:
                self._leave([speculative], "rolled back")
        self._note_usage(item, usage)
        return "".join(item.text)

    async def _answer(self, item: WorkItem, node: Generation, speculative: SpeculativeGeneration[D, R]) -> Usage | None:
        emit = self._emit_of(item, node)
        usage, began = None, False
        started_s = self._elapsed_s()
        question, documents = question_for(item, node, self.scope), documents_of(node, item.run.state)
        async with aclosing(speculative.attempt.answer(question, documents)) as chunks:
            async for chunk in chunks:
                if not began:
                    began = True
                    speculative.used(right=speculative.right)
                if item.trace.first_token_s is None and chunk.usage is None:
                    item.trace.first_token_s = self._elapsed_s()
                usage = chunk.usage or usage
                if not chunk.text:
                    continue
                item.text.append(chunk.text)
                before, item.tokens = item.tokens, item.tokens + chunk.tokens
                if emit is not None:
                    self._shown = item
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

    def _emit_of(self, item: WorkItem, node: Generation) -> Callable[[str], None] | None:
        return self._emit if self._may_show(node) and self._is_last(item) else None

    def _may_show(self, node: Generation) -> bool:
        ends = node.output == self.graph.answer and not self.graph.next_nodes(node.id)
        return self._emit is not None and ends and node.parse is None

    def _is_last(self, item: WorkItem) -> bool:
        graph, others = self.graph, [run.id for run in self._tokens.running if run != item.run]
        later = {vertex for id in others for vertex in (id, *graph.topology.later(id)) if vertex is not END}
        return not any(graph.answer in graph.nodes[id].writes for id in later)

    def _branched(self) -> History | None:
        if self._history is None:
            return self._workers.searcher.history()
        return self._history.branch()
