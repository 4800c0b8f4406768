"""Nodes that may start: branches that run side by side, and meet again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ragorder.pipelining.workflow.errors import GraphError, NodeError, WorkflowError
from ragorder.pipelining.workflow.graph import CompiledGraph
from ragorder.pipelining.workflow.nodes import END, START, Node, NodeId, Terminal
from ragorder.pipelining.workflow.state import State

__all__ = ["NodeRun", "Tokens"]


@dataclass(frozen=True, slots=True)
class NodeRun:
    """One run of a node in a request, in a round of the graph's loops."""

    node: Node = field(compare=False)
    id: NodeId
    round: int
    state: State = field(compare=False, repr=False)


class Tokens:
    """The places of one request in its graph.

        tokens = Tokens(graph, state)
        while runs := tokens.take():
            for run in runs:
                tokens.finish(run, values_of(run))
        tokens.state

    A node with a token starts when no other node that is active can still send it one for the same round; tokens that
    have met are one, their states joined. A round is the number of back edges on the way. So neither order nor times
    of the runs make a difference, and a slow branch holds up only what needs it.
    """

    def __init__(self, graph: CompiledGraph, state: State) -> None:
        self._graph = graph
        self._waiting: dict[tuple[NodeId, int], list[tuple[int, State]]] = {}
        self._running: dict[tuple[NodeId, int], NodeRun] = {}
        self._ended: list[tuple[int, int, State]] = []
        self._runs: Counter[NodeId] = Counter()
        self._send(START, 0, state)

    def copy(self) -> Tokens:
        """The same places, from which another course may be tried."""
        other = Tokens.__new__(Tokens)
        other._graph = self._graph
        other._waiting = {place: list(tokens) for place, tokens in self._waiting.items()}
        other._running, other._ended, other._runs = dict(self._running), list(self._ended), self._runs.copy()
        return other

    @property
    def running(self) -> tuple[NodeRun, ...]:
        return tuple(self._running.values())

    @property
    def done(self) -> bool:
        return not self._waiting and not self._running

    @property
    def state(self) -> State:
        """What all branches have written, once `done`."""
        return State.joined(state for *_, state in sorted(self._ended, key=lambda token: token[:2]))

    def take(self) -> list[NodeRun]:
        """Runs to start now, each returned once. Raises GraphError for a node that has run `max_rounds` times."""
        started = []
        for id, round in [place for place in self._waiting if not self._awaited(*place)]:
            tokens = sorted(self._waiting.pop((id, round)), key=lambda token: token[0])
            if self._runs[id] == self._graph.max_rounds:
                raise GraphError(
                    f"workflow {self._graph.name!r}: node {id!r} has run {self._runs[id]} times, its max_rounds: the "
                    "conditional edges of its loop never led out"
                )
            self._runs[id] += 1
            run = NodeRun(self._graph.nodes[id], id, round, State.joined(state for _, state in tokens))
            self._running[id, round] = run
            started.append(run)
        return started

    def finish(self, run: NodeRun, values: Mapping[str, Any]) -> None:
        """Store what a run has written, and go on along the edges. Raises GraphError and NodeError for a conditional
        edge that fails."""
        del self._running[run.id, run.round]
        self._send(run.id, run.round, run.state.updated(values))

    def _send(self, source: NodeId | Terminal, round: int, state: State) -> None:
        try:
            targets = self._graph.successors(source, state)
        except GraphError:
            raise
        except Exception as error:
            raise NodeError(self._graph.name, source, f"conditional edge: {_shown(error)}") from error
        topology = self._graph.topology
        for target in targets:
            if target is END:
                self._ended.append((round, topology.order[source], state))
            else:
                place = (target, round + ((source, target) in topology.back))
                self._waiting.setdefault(place, []).append((topology.order[source], state))

    def _awaited(self, id: NodeId, round: int) -> bool:
        rounds = self._graph.topology.rounds
        for other, other_round in (*self._waiting, *self._running):
            between = rounds[other].get(id)
            if between is not None and other_round + between <= round:
                return True
        return False


def _shown(error: Exception) -> str:
    return str(error) if isinstance(error, WorkflowError) else type(error).__name__
