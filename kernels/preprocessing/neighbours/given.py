"""Neighbours from a given graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel

from ragorder.common.jsonl import JSONLines
from ragorder.kernels.preprocessing.neighbours.base import Neighbours, neighbours

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["GivenNeighbours"]

_EXAMPLE = '{"id": "a", "neighbours": ["b", "c"]}'


class _Vertex(BaseModel):
    id: str
    neighbours: list[str]


@neighbours.register("graph", 'from a graph (graph:FILE, JSON lines {"id", "neighbours"}, nearest first)')
class GivenNeighbours(Neighbours):
    """The neighbours of each id, nearest first. Ids outside the corpus are ignored."""

    def __init__(self, graph: Mapping[str, Sequence[str]]) -> None:
        self._graph = graph

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        """Raises JSONLinesError naming file and line."""
        if not argument:
            raise ValueError("give the file of the graph: graph:FILE")
        lines = JSONLines(argument, example=_EXAMPLE)
        graph: dict[str, Sequence[str]] = {}
        for number, vertex in lines.read(_Vertex):
            if vertex.id in graph:
                raise lines.error(number, f"the id {vertex.id!r} occurs twice: give its neighbours in one line")
            graph[vertex.id] = vertex.neighbours
        return cls(graph)

    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        """Raises ValueError if the graph has none of the ids, which suggests another corpus."""
        places = {id: place for place, id in enumerate(ids)}
        if ids and not places.keys() & self._graph.keys():
            raise ValueError(f"the graph has none of the {len(ids)} documents: give the graph of this corpus")
        found: list[list[int]] = []
        for id in ids:
            known = dict.fromkeys(other for other in self._graph.get(id, ()) if other in places and other != id)
            found.append([places[other] for other in known][:count])
        return found
