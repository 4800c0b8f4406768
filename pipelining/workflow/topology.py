"""Static structure of a graph: back edges, and the rounds between two nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from ragorder.pipelining.workflow.nodes import END, START, NodeId, Terminal

__all__ = ["Topology"]

Place = NodeId | Terminal


class Topology:
    """`edges`: what may follow each node, and START. A back edge leads to a node that the depth-first search from START
    is still in; each begins another round. The other edges have no cycle."""

    def __init__(self, edges: Mapping[Place, Sequence[Place]]) -> None:
        self._edges = edges
        self.order: dict[Place, int] = {}
        self.back: set[tuple[Place, Place]] = set()
        self._search()

    def _search(self) -> None:
        entered: set[Place] = {START}
        done: list[Place] = []
        finished: set[Place] = set()
        stack: list[tuple[Place, Iterator[Place]]] = [(START, iter(self._edges.get(START, ())))]
        while stack:
            place, targets = stack[-1]
            for target in targets:
                if target not in entered:
                    entered.add(target)
                    stack.append((target, iter(self._edges.get(target, ()))))
                    break
                if target not in finished:
                    self.back.add((place, target))
            else:
                stack.pop()
                finished.add(place)
                done.append(place)
        self.order = {place: rank for rank, place in enumerate(reversed(done))}

    @cached_property
    def rounds(self) -> Mapping[Place, Mapping[Place, int]]:
        """Fewest back edges on a way, of one edge or more, from a node to another; without an entry there is none."""
        return {place: self._rounds_from(place) for place in self.order}

    def _rounds_from(self, start: Place) -> dict[Place, int]:
        fewest: dict[Place, int] = {}
        queue: deque[tuple[Place, int]] = deque([(start, 0)])
        while queue:
            place, rounds = queue.popleft()
            for target in self._edges.get(place, ()):
                back = (place, target) in self.back
                if rounds + back < fewest.get(target, len(self.order) + 1):
                    fewest[target] = rounds + back
                    (queue.append if back else queue.appendleft)((target, rounds + back))
        return fewest

    def precedes(self, first: Place, second: Place) -> bool:
        """Within one round."""
        return self.rounds[first].get(second) == 0

    def reached(self, without: Place | None = None) -> set[Place]:
        """From START, on ways that avoid a node."""
        return _reached(self._edges, START, without)

    def leads_to_end(self) -> set[Place]:
        sources: dict[Place, list[Place]] = {}
        for place, targets in self._edges.items():
            for target in targets:
                sources.setdefault(target, []).append(place)
        return _reached(sources, END, None)


def _reached(edges: Mapping[Place, Sequence[Place]], start: Place, without: Place | None) -> set[Place]:
    seen, waiting = {start}, [start]
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in seen and target != without:
                seen.add(target)
                waiting.append(target)
    return seen
