"""Static structure of a graph: its loops, what comes before a node, and what may run side by side."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from ragorder.pipelining.workflow.nodes import END, START, NodeId, Terminal

__all__ = ["Loop", "Place", "Position", "Topology"]

Place = NodeId | Terminal

Position = tuple[Place, bool]
"""A node that a branch has come to; True if it is the head of a loop, and the branch waits for the next round."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Nodes that can all reach each other. An edge from one of them to one of `heads` ends its branch's round."""

    nodes: frozenset[Place]
    heads: frozenset[Place]


class Topology:
    """`edges`: of each node, and START, the targets of each of its edges; several of a conditional one.

    A loop's head is the node that is entered from outside. If there are several, it is the one that leads to all others
    whatever the conditions; if none does, all are heads, and `parallel` says whether two may be entered at once. Loops
    within a loop are those of its nodes without the heads.
    """

    def __init__(self, edges: Mapping[Place, Sequence[tuple[Place, ...]]]) -> None:
        self._edges = edges
        self._next: dict[Place, tuple[Place, ...]] = {
            place: tuple(dict.fromkeys(target for targets in out for target in targets)) for place, out in edges.items()
        }
        self._certain = {place: [targets[0] for targets in out if len(targets) == 1] for place, out in edges.items()}
        self._later: dict[Place, frozenset[Place]] = {}
        self._before: dict[Place, frozenset[Place]] = {}
        self.order: dict[Place, int] = {place: rank for rank, place in enumerate(edges)}

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """Outer ones before those within them."""
        return tuple(self._loops_within([place for place in self._edges if place is not START]))

    @cached_property
    def back(self) -> tuple[tuple[Place, Place], ...]:
        """Edges that end a round."""
        return tuple(
            (place, target) for place, out in self._next.items() for target in out if self.ends_round(place, target)
        )

    def loop(self, head: Place) -> Loop:
        """That which begins its rounds there."""
        return self._headed[head]

    def ends_round(self, source: Place, target: Place) -> bool:
        loop = self._headed.get(target)
        return loop is not None and source in loop.nodes

    def later(self, place: Place) -> frozenset[Place]:
        """All that can still come after a node, END included, and itself if it is in a loop."""
        if place not in self._later:
            self._later[place] = frozenset(_reached(self._next, self._next.get(place, ())))
        return self._later[place]

    def before(self, place: Place) -> frozenset[Place]:
        """All from which a way leads to a node within one round of the loops that it is in."""
        if place not in self._before:
            seen: set[Place] = set()
            waiting = [place]
            while waiting:
                target = waiting.pop()
                loop = self._headed.get(target)
                around = loop.nodes if loop is not None and place in loop.nodes else ()
                new = [
                    source for source in self._sources.get(target, ()) if source not in seen and source not in around
                ]
                seen.update(new)
                waiting += new
            self._before[place] = frozenset(seen)
        return self._before[place]

    def awaits(self, one: Position, other: Position) -> bool:
        """Whether the one branch must wait until the other has come to it, or can no longer. A loop's next round waits
        for all of this one."""
        (place, again), (other_place, other_again) = one, other
        loop, other_loop = self._headed.get(place), self._headed.get(other_place)
        if again and loop is not None and other_place in loop.nodes:
            return not (other_again and other_loop is loop)
        if other_again and other_loop is not None and place in other_loop.nodes:
            return False
        return other_place in self.before(place)

    @cached_property
    def parallel(self) -> Mapping[frozenset[Position], Place]:
        """Where two branches of a request may be at one time, and where they parted; one may have to wait for the
        other."""
        found: dict[frozenset[Position], Place] = {}
        waiting = [
            ((target, self.ends_round(source, target)), (beside, self.ends_round(source, beside)), source)
            for source, out in self._edges.items()
            for one, other in combinations(out, 2)
            for target in one
            for beside in other
        ]
        while waiting:
            one, other, parted = waiting.pop()
            pair = frozenset((one, other))
            if one[0] == other[0] or END in (one[0], other[0]) or pair in found:
                continue
            found[pair] = parted
            for moving, staying in ((one, other), (other, one)):
                if not self.awaits(moving, staying):
                    waiting += [
                        ((target, self.ends_round(moving[0], target)), staying, parted)
                        for target in self._next[moving[0]]
                    ]
        return found

    def reached(self, without: Place | None = None) -> set[Place]:
        """START, and all that it leads to on ways that avoid a node."""
        return {START} | _reached(self._next, [START], without)

    def leads_to_end(self) -> set[Place]:
        return _reached(self._sources, [END])

    @cached_property
    def _headed(self) -> Mapping[Place, Loop]:
        return {head: loop for loop in self.loops for head in loop.heads}

    @cached_property
    def _sources(self) -> Mapping[Place, list[Place]]:
        sources: dict[Place, list[Place]] = {}
        for place, out in self._next.items():
            for target in out:
                sources.setdefault(target, []).append(place)
        return sources

    def _loops_within(self, places: Collection[Place]) -> Iterator[Loop]:
        inside = _within(self._next, places)
        later = {place: _reached(inside, inside[place]) for place in places}
        seen: set[Place] = set()
        for place in places:
            if place in later[place] and place not in seen:
                nodes = [other for other in places if other in later[place] and place in later[other]]
                seen.update(nodes)
                heads = self._heads(frozenset(nodes))
                yield Loop(frozenset(nodes), heads)
                yield from self._loops_within([node for node in nodes if node not in heads])

    def _heads(self, nodes: frozenset[Place]) -> frozenset[Place]:
        entered = frozenset(
            target for place, out in self._next.items() if place not in nodes for target in out if target in nodes
        )
        certain = _within(self._certain, nodes)
        first = [place for place in entered if entered <= {place} | _reached(certain, certain[place])]
        return frozenset(first) if len(first) == 1 else entered or nodes


def _within(edges: Mapping[Place, Iterable[Place]], places: Collection[Place]) -> dict[Place, list[Place]]:
    kept = frozenset(places)
    return {place: [target for target in edges.get(place, ()) if target in kept] for place in places}


def _reached(
    edges: Mapping[Place, Iterable[Place]], starts: Iterable[Place], without: Place | None = None
) -> set[Place]:
    """`starts`, and all that they lead to."""
    waiting = list(starts)
    seen = set(waiting)
    while waiting:
        for target in edges.get(waiting.pop(), ()):
            if target not in seen and target != without:
                seen.add(target)
                waiting.append(target)
    return seen
