"""Nodes that come next, and searches for them ahead of need (HedraRAG section 4.3, speculative retrieval)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ragorder.pipelining.workflow.join import NodeRun, Tokens
from ragorder.pipelining.workflow.nodes import Retrieval, Step
from ragorder.pipelining.workflow.searching import Handle, Searcher
from ragorder.pipelining.workflow.wavefront import Facts, Piece

if TYPE_CHECKING:
    from ragorder.pipelining.search import History

__all__ = ["SearchAhead", "foresee"]

_MAX_STEPS = 8


def foresee(tokens: Tokens, *ended: tuple[NodeRun, Mapping[str, Any]]) -> list[NodeRun]:
    """Generations and retrievals that would become due if these runs wrote these values, one after another, directly or
    through pure steps. Raises what a step or an edge raises, and KeyError if one run does not lead to the next."""
    ahead = tokens.copy()
    runs: list[NodeRun] = []
    for run, values in ended:
        ahead.finish(run, values)
        runs = _started(ahead)
    return runs


def _started(ahead: Tokens) -> list[NodeRun]:
    runs: list[NodeRun] = []
    for _ in range(_MAX_STEPS):
        steps: list[NodeRun] = []
        for started in ahead.take():
            (steps if isinstance(started.node, Step) else runs).append(started)
        if not steps:
            break
        for step in steps:
            written = _called_ahead(step)
            if written is not None:
                ahead.finish(step, written)
    return runs


def _called_ahead(run: NodeRun) -> Mapping[str, Any] | None:
    step = run.node
    if not isinstance(step, Step) or not step.pure:
        return None
    values: Any = step.function(run.state)
    if inspect.iscoroutine(values):
        try:
            values.send(None)
        except StopIteration as done:
            values = done.value
        else:
            # It waits for something.
            values.close()
            return None
    return values if isinstance(values, Mapping) else None


class SearchAhead:
    """A search for a query that may become due. Its results go into a history of their own, `history`, so that nothing
    of a branch that is left reaches the request's."""

    def __init__(
        self,
        piece: Piece,
        node: Retrieval,
        query: str,
        history: History | None,
        before: SearchAhead | None,
        searcher: Searcher[Any],
        facts: Facts,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.piece = piece
        self.query = query
        self.history = history
        self.vector: Any = None
        self._topk = node.topk
        self._before = None if before is None else before.vector
        self._searcher = searcher
        self._facts = facts
        self._handle: Handle | None = None
        self._spawn = spawn
        self._watching: asyncio.Task[None] | None = None
        self.task = spawn(self._begin())

    async def taken(self, query: str) -> Handle | None:
        """The search, now due, if this is its query. Otherwise, and if it has failed, None: it has ended."""
        if query != self.query:
            self.cancel()
            return None
        await asyncio.wait((self.task,))
        if self._watching is not None:
            self._watching.cancel()
        if self._handle is not None:
            self._handle.promote()
        return self._handle

    def cancel(self) -> None:
        self.task.cancel()
        if self._watching is not None:
            self._watching.cancel()
        if self._handle is not None:
            # What it has found so far goes into its history.
            self._handle.cancel()

    @property
    def clusters(self) -> int | None:
        stage = None if self._handle is None else self._handle.stage
        return None if stage is None else stage.number

    async def _begin(self) -> None:
        self._facts.embedding_ahead += 1
        try:
            self.vector = await self._searcher.vector(self.query)
        except Exception:
            # The due search meets the error itself.
            return
        finally:
            self._facts.embedding_ahead -= 1
        if self.piece.after is not None and self._before is not None:
            self.piece.after.drift = self._searcher.distance(self._before, self.vector)
        try:
            self._handle = self._searcher.submit(
                self.vector,
                self._topk,
                history=self.history,
                due=False,
                split=self.piece.split,
                fast=self.piece.fast,
                prefetch=self.piece.prefetch,
            )
        except Exception:
            return
        self._watching = self._spawn(self._watch(self._handle))

    async def _watch(self, handle: Handle) -> None:
        """What it finds is news, from which a generation may be foreseen."""
        try:
            async with aclosing(handle.stages_async()) as stages:
                async for stage in stages:
                    self.piece.stage = stage
                    if stage.ids.tobytes() != self.piece.speculated:
                        self._facts.wavefront.progress(self.piece)
                    if stage.final:
                        return
        except Exception:
            # The due search starts over, and meets the error itself.
            handle.cancel()
            self._handle = None
