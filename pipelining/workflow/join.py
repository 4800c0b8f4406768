"""Positions of a request in its graph, and a plain run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import aclosing
from itertools import chain
from typing import Any

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.protocols import D, PipelineTrace, R, RequestBuilder, StreamingEngine
from ragorder.pipelining.workflow.execution import answered, call_step, documents_of, found, query_of, question_of
from ragorder.pipelining.workflow.graph import CompiledGraph, checked_graph
from ragorder.pipelining.workflow.nodes import (
    END,
    START,
    Generation,
    GraphError,
    NodeError,
    NodeId,
    NodeQuestion,
    NodeRun,
    Retrieval,
    RoundsError,
    State,
    Terminal,
    WorkflowError,
)
from ragorder.pipelining.workflow.result import WorkflowResult
from ragorder.pipelining.workflow.topology import Position


class Tokens:
    """One request's positions in its graph.

    A node with a token starts once no other token can reach it in this round of its loops; tokens that meet become one.
    So results do not depend on the order or duration of runs. `until`: a name of the state; a branch ends where nothing
    that follows writes it.
    """

    def __init__(self, graph: CompiledGraph, state: State, until: str | None = None) -> None:
        self._graph = graph
        self.until = until
        self._waiting: dict[Position, list[tuple[int, int, State]]] = {}
        self._running: dict[tuple[NodeId, int], NodeRun] = {}
        self._ended: list[tuple[int, int, State]] = []
        self._runs: Counter[NodeId] = Counter()
        self._ages: dict[NodeId, int] = {}
        self._send(START, 0, state)

    def copy(self) -> Tokens:
        other = Tokens.__new__(Tokens)
        other._graph, other.until = self._graph, self.until
        other._waiting = {position: list(tokens) for position, tokens in self._waiting.items()}
        other._running, other._ended = dict(self._running), list(self._ended)
        other._runs, other._ages = self._runs.copy(), dict(self._ages)
        return other

    @property
    def running(self) -> tuple[NodeRun, ...]:
        return tuple(self._running.values())

    @property
    def branches(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def done(self) -> bool:
        return not self._waiting and not self._running

    @property
    def state(self) -> State:
        return _joined(self._ended)

    @property
    def state_so_far(self) -> State:
        """The newest value of each name in all branches."""
        order = self._graph.topology.order
        running = [(order[run.id], run.round, run.state) for run in self._running.values()]
        return _joined([*self._ended, *chain.from_iterable(self._waiting.values()), *running])

    def alone(self, run: NodeRun) -> Tokens:
        """Return a copy in which only this run has begun."""
        other = self.copy()
        other._waiting, other._ended = {}, []
        other._running = {run.key: run}
        return other

    def take(self) -> list[NodeRun]:
        """Return the runs to start now. Raises RoundsError for a node that has run `max_rounds` times."""
        started = []
        active = [*self._waiting, *((id, False) for id, _ in self._running)]
        awaits = self._graph.topology.awaits
        for position in [one for one in self._waiting if not any(awaits(one, other) for other in active)]:
            id, again = position
            round = self._runs[id]
            if round == self._graph.max_rounds:
                raise RoundsError(
                    f"workflow {self._graph.name!r}: node {id!r} has run {round} times, its max_rounds: the "
                    "conditional edges of its loop never led out"
                )
            tokens = self._waiting.pop(position)
            self._runs[id] += 1
            run = NodeRun(self._graph.nodes[id], id, round, _joined(tokens, self._age_before(id, again)))
            self._running[run.key] = run
            started.append(run)
        return started

    def leave(self, run: NodeRun) -> None:
        """End the branch before this run."""
        del self._running[run.key]
        self._ended.append((self._graph.topology.order[run.id], run.round, run.state))

    def finish(self, run: NodeRun, values: Mapping[str, Any]) -> None:
        del self._running[run.key]
        state = run.state.updated(values)
        self._ages[run.id] = state.age
        self._send(run.id, run.round, state)

    def _send(self, source: NodeId | Terminal, round: int, state: State) -> None:
        try:
            targets = self._graph.successors(source, state)
        except GraphError:
            raise
        except Exception as error:
            raise NodeError(self._graph.name, source, f"conditional edge: {_shown(error)}") from error
        topology = self._graph.topology
        for target in targets:
            if target is END or not self._graph.leads_to(target, self.until):
                tokens = self._ended
            else:
                tokens = self._waiting.setdefault((target, topology.ends_round(source, target)), [])
            tokens.append((topology.order[source], round, state))

    def _age_before(self, id: NodeId, again: bool) -> int:
        topology = self._graph.topology
        waited = topology.loop(id).nodes if again else topology.before(id)
        return max((age for other, age in self._ages.items() if other in waited), default=0)


def _joined(tokens: list[tuple[int, int, State]], age: int = 0) -> State:
    return State.joined((state for *_, state in sorted(tokens, key=lambda token: token[:2])), age)


def _shown(error: Exception) -> str:
    return str(error) if isinstance(error, WorkflowError) else type(error).__name__


async def interpret(
    graph: CompiledGraph,
    question: str,
    *,
    engine: StreamingEngine[R],
    prompts: RequestBuilder[NodeQuestion, D, R],
    retrieve: Callable[[str, int], Awaitable[Sequence[D]]],
    state: Mapping[str, Any] | None = None,
    scope: Hashable = None,
) -> WorkflowResult:
    """Run node after node. `retrieve` returns documents, best first. Raises GraphError and NodeError."""

    async def values_of(run: NodeRun) -> Mapping[str, Any]:
        node = run.node
        if isinstance(node, Generation):
            attempt = Attempt(engine, prompts, None, PipelineTrace(), lambda: 0.0)
            chunks = attempt.answer(question_of(node, run.state, scope), documents_of(node, run.state))
            async with aclosing(chunks):
                return answered(node, "".join([chunk.text async for chunk in chunks]), run.state)
        if isinstance(node, Retrieval):
            return found(node, await retrieve(query_of(node, run.state), node.topk))
        return await call_step(node, run.state)

    tokens = Tokens(graph, checked_graph(graph).begin(question, state))
    while runs := tokens.take():
        for run in runs:
            try:
                values = await values_of(run)
            except Exception as error:
                raise NodeError.of(graph.name, run.id, error) from error
            tokens.finish(run, values)
    return graph.result(tokens.state)
