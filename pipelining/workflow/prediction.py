"""Known and predicted nodes, and their speculative searches (HedraRAG 4.3)."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

from ragorder.pipelining.workflow.execution import answered, found, query_of
from ragorder.pipelining.workflow.join import Tokens
from ragorder.pipelining.workflow.nodes import UNKNOWN, Generation, NodeId, NodeRun, Retrieval, Step
from ragorder.pipelining.workflow.searching import Handle, Searcher, Spawn
from ragorder.pipelining.workflow.wavefront import Measurements, WorkItem

if TYPE_CHECKING:
    from ragorder.pipelining.search import History

Query = tuple[NodeId, str]
"""A retrieval's id, and what it searches for."""
RunKey = tuple[NodeId, int]

_MAX_STEPS = 8
_MAX_AHEAD = 16
_MAX_RUNS = 128
# One line and several, without a word that a condition may look for.
_UNKNOWN = ("qzx 7", "jvk\nwpf\nhgy\nbxq 4")


def predict_runs(tokens: Tokens, *ended: tuple[NodeRun, Mapping[str, Any]]) -> list[NodeRun]:
    """Return the generations and searches due once these runs have written these values; pure steps are called."""
    expected = tokens.copy()
    runs: list[NodeRun] = []
    for run, values in ended:
        expected.finish(run, values)
        runs = _started(expected)
    return runs


def known_runs(tokens: Tokens) -> tuple[dict[Query, NodeRun], set[RunKey]]:
    """Return the next searches whose queries are the same for two texts in place of what still runs, and, if all are,
    the runs that follow, whose start makes no other search known."""
    (first, runs), (second, others) = (_searches_after(tokens, text) for text in _UNKNOWN)
    known = {query: run for query, run in first.items() if query in second}
    return known, runs & others if known.keys() == first.keys() == second.keys() else set()


def _searches_after(tokens: Tokens, text: str) -> tuple[dict[Query, NodeRun], set[RunKey]]:
    """Return no runs if they are too many, or depend on what is not called."""
    expected = tokens.copy()
    searches: dict[Query, NodeRun] = {}
    running = deque(expected.running)
    followed: set[RunKey] = set()
    whole = True
    for number in range(_MAX_RUNS):
        if not running or len(searches) >= _MAX_AHEAD:
            break
        run = running.popleft()
        values: Mapping[str, Any] | None = None
        # A function of the graph may be unable to read such a text: what follows is unknown.
        with suppress(Exception):
            values = _unknown_values(run, f"{text} {number}")
        if values is None:
            whole = False
            continue
        try:
            expected.finish(run, values)
            started = expected.take()
        except Exception:
            whole = False
            break
        for each in started:
            followed.add(each.key)
            if isinstance(each.node, Retrieval):
                try:
                    searches.setdefault((each.id, query_of(each.node, each.state)), each)
                except Exception:
                    whole = False
        running.extend(started)
    return searches, followed if whole and not running else set()


def _unknown_values(run: NodeRun, text: str) -> Mapping[str, Any] | None:
    node = run.node
    if isinstance(node, Generation):
        return answered(node, text, run.state)
    if isinstance(node, Retrieval):
        return found(node, (f"{text} {rank}" for rank in range(node.topk)))
    return _call_pure(run)


def may_lead_on(tokens: Tokens, run: NodeRun) -> bool:
    """Return False if no text of this generation can lead to `tokens.until`."""
    if tokens.branches > 1 or tokens.until in run.node.writes:
        return True
    expected = tokens.alone(run)
    runs = [run]
    try:
        for _ in range(_MAX_STEPS):
            for each in runs:
                # A function that reads the text fails.
                unknown = dict.fromkeys(each.node.writes, UNKNOWN)
                values = unknown if isinstance(each.node, Generation) else _call_pure(each)
                if values is None or tokens.until in values:
                    return True
                expected.finish(each, values)
            if expected.done:
                return False
            runs = expected.take()
    except Exception:
        return True
    return True


def _started(expected: Tokens) -> list[NodeRun]:
    runs: list[NodeRun] = []
    for _ in range(_MAX_STEPS):
        steps: list[NodeRun] = []
        for started in expected.take():
            (steps if isinstance(started.node, Step) else runs).append(started)
        if not steps:
            break
        for step in steps:
            written = _call_pure(step)
            if written is not None:
                expected.finish(step, written)
    return runs


def _call_pure(run: NodeRun) -> Mapping[str, Any] | None:
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
            # The step awaits something, which must not happen here.
            values.close()
            return None
    return values if isinstance(values, Mapping) else None


class SpeculativeSearch:
    """A speculative search, with a branch of the request's `history`."""

    def __init__(
        self,
        item: WorkItem,
        node: Retrieval,
        query: str,
        history: History | None,
        before: SpeculativeSearch | None,
        searcher: Searcher[Any],
        measured: Measurements,
        spawn: Spawn,
    ) -> None:
        self.item = item
        self.query = query
        self.history = history
        self.vector: Any = None
        self._topk = node.topk
        self._before = None if before is None else before.vector
        self._searcher = searcher
        self._measured = measured
        self._handle: Handle | None = None
        self._spawn = spawn
        self._watching: asyncio.Task[None] | None = None
        self.task = spawn(self._begin())

    async def use(self, query: str) -> Handle | None:
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
            # A cancelled search stores its results in its history.
            self._handle.cancel()

    @property
    def clusters(self) -> int | None:
        stage = None if self._handle is None else self._handle.stage
        return None if stage is None else stage.number

    async def _begin(self) -> None:
        self._measured.speculative_embeddings += 1
        try:
            self.vector = await self._searcher.vector(self.query)
        except Exception:
            # The due search raises the error itself.
            return
        finally:
            self._measured.speculative_embeddings -= 1
        if self.item.after is not None and self._before is not None:
            # A search function of one's own may take vectors that cannot be subtracted.
            with suppress(Exception):
                self.item.after.drift = self._searcher.distance(self._before, self.vector)
        try:
            self._handle = self._searcher.begin(
                self.vector,
                self._topk,
                self._spawn,
                history=self.history,
                split=self.item.split,
            )
        except Exception:
            return
        # No generation can begin on a known search, and one that is not shared starts over itself.
        if self._measured.cuts or not self.item.known:
            self._watching = self._spawn(self._watch(self._handle))

    async def _watch(self, handle: Handle) -> None:
        try:
            async with aclosing(handle.stages_async()) as stages:
                async for stage in stages:
                    self.item.stage = stage
                    if stage.ids.tobytes() != self.item.speculated:
                        self._measured.wavefront.progress(self.item)
                    if stage.final:
                        return
        except Exception:
            # The due search starts over and raises the error itself.
            handle.cancel()
            self._handle = None
