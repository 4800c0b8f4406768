"""One request's course through its graph."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping
from contextlib import aclosing
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ragorder.pipelining.protocols import EngineRequest, Usage
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.workflow.execution import answered, call_step, documents_of, found, query_of
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.join import NodeRun, Tokens
from ragorder.pipelining.workflow.nodes import END, Generation, NodeError, Retrieval, State
from ragorder.pipelining.workflow.result import Outcome, PieceTrace, WorkflowTrace
from ragorder.pipelining.workflow.searching import Handle
from ragorder.pipelining.workflow.speculations import GenerationAhead, Speculations, Workers, question_for
from ragorder.pipelining.workflow.wavefront import Piece, worker_of

if TYPE_CHECKING:
    from ragorder.pipelining.search import History
    from ragorder.pipelining.staged import Stage

__all__ = ["WorkflowRun"]

D = TypeVar("D")
R = TypeVar("R", bound=EngineRequest)

_LOOK_EVERY = 8
"""Tokens of a generation between two scheduling cycles that look at it."""


class WorkflowRun(Generic[D, R]):
    """Starts nodes when their inputs are there, and pieces ahead of need where a scheduling cycle has added them.

    `emit` is called with the answer's text as it is generated, where no later node can change it.
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
        self._results: asyncio.Queue[tuple[Piece, Mapping[str, Any] | BaseException]] = asyncio.Queue()
        self._pieces: set[Piece] = set()
        self._working: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._ahead = Speculations(workers, scope, self._elapsed_s, self._begun, self._end)

    async def run(self) -> State:
        """Raises GraphError and NodeError. Whatever runs for it has ended."""
        self._tokens: Tokens
        try:
            self._tokens = tokens = Tokens(self.graph, self._state)
            while not tokens.done:
                for run in tokens.take():
                    self._add(run)
                self._leave(self._ahead.left(tokens), "wasted")
                piece, values = await self._results.get()
                if isinstance(values, BaseException):
                    raise NodeError.of(self.graph.name, piece.run.id, values) from values
                tokens.finish(piece.run, values)
            self._leave(self._ahead.drop_all("wasted"), "wasted")
            return tokens.state
        finally:
            await self._close()

    @property
    def searches(self) -> int:
        return 0 if self._history is None else len(self._history)

    def foreseen(self, piece: Piece, /) -> list[NodeRun]:
        return self._context.copy().run(self._ahead.foreseen, self._tokens, piece)

    def has_place(self, piece: Piece, /) -> bool:
        return self._context.copy().run(self._ahead.has_place, piece)

    def lengths(self, piece: Piece, /) -> Callable[[], CachedLengths] | None:
        node, predict = piece.node, getattr(self._workers.prompts, "lengths", None)
        if predict is None or not isinstance(node, Generation):
            return None

        def lengths() -> Any:
            return predict(question_for(piece, node, self.scope), documents_of(node, piece.run.state))

        try:
            found: Callable[[], CachedLengths] | None = self._context.copy().run(lengths)
        except Exception:
            # The generation itself meets the error.
            return None
        return found

    def start(self, piece: Piece, /) -> None:
        # A scheduling cycle runs in the context of whichever request asked for it.
        self._context.copy().run(self._start, piece)

    def _start(self, piece: Piece) -> None:
        if piece.after is None:
            self._begun(piece)
            self._spawn(self._work(piece), self._working)
            return
        piece.trace.planned_s = self._elapsed_s()
        try:
            self._ahead.begin(piece, piece.after, self._branched)
        except Exception:
            # It was foreseen from half a text.
            self._end(piece, "cancelled")

    def _elapsed_s(self) -> float:
        return self._workers.clock() - self.trace.started_s

    def _add(self, run: NodeRun) -> None:
        self.trace.rounds[run.id] = self.trace.rounds.get(run.id, 0) + 1
        piece = Piece(self, run, PieceTrace(run.id, "due", worker_of(run.node), self._elapsed_s()))
        self._pieces.add(piece)
        self._workers.wavefront.add(piece)

    def _begun(self, piece: Piece) -> None:
        piece.trace.started_s = self._elapsed_s()
        self.trace.add(piece.trace)

    def _end(self, piece: Piece, outcome: Outcome) -> None:
        self._pieces.discard(piece)
        self._workers.wavefront.end(piece, outcome, self._elapsed_s())

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def _leave(self, generations: list[GenerationAhead[D, R]], outcome: Outcome) -> None:
        for generation in generations:
            self._spawn(generation.leave(outcome), self._leaving)

    async def _close(self) -> None:
        """Ends what still runs; a caller that is cancelled meanwhile waits all the same."""
        for piece in tuple(self._pieces):
            self._end(piece, "cancelled")
        # What leaves is not cancelled: it would not wait for the engine, or not even begin to.
        for task in self._working:
            task.cancel()
        self._leave(self._ahead.drop_all("cancelled"), "cancelled")
        cancelled: asyncio.CancelledError | None = None
        while tasks := self._working | self._leaving | self._ahead.tasks:
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _work(self, piece: Piece) -> None:
        values: Mapping[str, Any] | BaseException
        try:
            if isinstance(piece.node, Generation):
                values = await self._generate(piece, piece.node)
            elif isinstance(piece.node, Retrieval):
                values = await self._retrieve(piece, piece.node)
            else:
                values = await call_step(piece.node, piece.run.state)
        except asyncio.CancelledError as error:
            if piece.ended:
                raise
            # Not the request: something that the node waited for.
            values = error
        except Exception as error:
            values = error
        self._end(piece, "failed" if isinstance(values, BaseException) else "used")
        self._results.put_nowait((piece, values))

    async def _retrieve(self, piece: Piece, node: Retrieval) -> Mapping[str, Any]:
        facts, searcher = self._workers.facts, self._workers.searcher
        query = query_of(node, piece.run.state)
        handle, history = await self._ahead.search(piece, query)
        if history is not None:
            self._history = history
        started_s = self._elapsed_s()
        near = self.searches > 0
        if handle is None:
            vector = await searcher.vector(query)
            piece.trace.embed_s = self._elapsed_s() - started_s
            facts.embed_s.add(piece.trace.embed_s)
            started_s = self._elapsed_s()
            if self._history is None and piece.reorder:
                self._history = searcher.history()
            # What a search ahead of need has found is used in any case.
            past = self._history if piece.reorder or history is not None else None
            handle = searcher.submit(vector, node.topk, history=past, split=piece.split, fast=piece.fast)
            stage = await self._stages(piece, handle)
            facts.search_s.add(self._elapsed_s() - started_s)
        else:
            stage = await self._stages(piece, handle)
        piece.trace.clusters, piece.trace.settled = stage.number, stage.settled
        (facts.settled_near if near else facts.settled).add(1 - stage.settled / max(1, stage.stages))
        return found(node, searcher.documents(stage))

    async def _stages(self, piece: Piece, handle: Handle) -> Stage:
        seen: dict[int, tuple[bytes, float]] = {}
        try:
            async with aclosing(handle.stages_async()) as stages:
                async for stage in stages:
                    piece.stage = stage
                    piece.trace.stages += 1
                    ids = stage.ids.tobytes()
                    if stage.final:
                        break
                    seen[piece.part] = ids, self._elapsed_s()
                    if ids != piece.speculated:
                        self._workers.wavefront.progress(piece)
        finally:
            handle.cancel()
        if seen:
            now_s = self._elapsed_s()
            rights = [(before == ids, now_s - at_s) for before, at_s in seen.values()]
            self._workers.facts.odds(piece).learn(rights, seen)
        return stage

    async def _generate(self, piece: Piece, node: Generation) -> Mapping[str, Any]:
        ahead = self._ahead.generation(piece.run)
        try:
            usage = await self._answer(piece, node, ahead)
        finally:
            if not ahead.idle:
                self._leave([ahead], "rolled back")
        self._note_usage(piece, usage)
        return answered(node, "".join(piece.text), piece.run.state)

    async def _answer(self, piece: Piece, node: Generation, ahead: GenerationAhead[D, R]) -> Usage | None:
        emit = self._emit if self._emit is not None and self._is_answer(piece, node) else None
        usage: Usage | None = None
        started_s = self._elapsed_s()
        question, documents = question_for(piece, node, self.scope), documents_of(node, piece.run.state)
        async with aclosing(ahead.attempt.answer(question, documents)) as chunks:
            async for chunk in chunks:
                if piece.trace.first_token_s is None:
                    piece.trace.first_token_s = self._elapsed_s()
                    ahead.used(right=ahead.right)
                usage = chunk.usage or usage
                if not chunk.text:
                    continue
                piece.text.append(chunk.text)
                before, piece.tokens = piece.tokens, piece.tokens + chunk.tokens
                if emit is not None:
                    emit(chunk.text)
                if piece.tokens // _LOOK_EVERY > before // _LOOK_EVERY:
                    self._workers.wavefront.progress(piece)
        if not ahead.right:
            self._workers.facts.generation_s.add(self._elapsed_s() - started_s)
        return usage

    def _note_usage(self, piece: Piece, usage: Usage | None) -> None:
        piece.trace.tokens = piece.tokens
        if usage is None:
            return
        piece.trace.tokens = usage.completion_tokens or piece.tokens
        piece.trace.prompt_tokens, piece.trace.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        if piece.ordered and usage.prompt_tokens and usage.cached_tokens is not None:
            self._workers.facts.cached_share.add(usage.cached_tokens / usage.prompt_tokens)

    def _is_answer(self, piece: Piece, node: Generation) -> bool:
        """One that nothing changes: no later node, and none beside it that leads to another answer."""
        graph, others = self.graph, [run.id for run in self._tokens.running if run != piece.run]
        ahead = {place for id in others for place in (id, *graph.topology.later(id)) if place is not END}
        return (
            node.parse is None
            and node.output == graph.answer
            and not graph.foreseen(node.id)
            and not any(graph.answer in graph.nodes[id].writes for id in ahead)
        )

    def _branched(self) -> History | None:
        if self._history is None:
            return self._workers.searcher.history()
        return self._history.branch()
