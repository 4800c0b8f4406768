"""Choices of neighbours for documents (FusionRAG 3.1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field

from ragorder.common.extras import needs
from ragorder.common.jsonl import JSONLines
from ragorder.kernels.preprocessing.encoder import TextEncoder
from ragorder.trie.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Neighbours(ABC):
    """For each document, others likely to be retrieved with it.

    @neighbours.register("next", "the documents that follow in the corpus")
    class NextNeighbours(Neighbours):
        def nearest(self, ids, vectors, count):
            return [list(range(place + 1, len(ids)))[:count] for place in range(len(ids))]
    """

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        """Make the choice for this argument. Raises ValueError."""
        if argument is not None:
            raise ValueError(f"takes no argument, got {argument!r}: leave it out")
        return cls()

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """Return what `nearest` needs, (texts, dimensions), or None."""
        return None

    @abstractmethod
    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        """Return for each document the indices of at most `count` others, most related first. `ids` are unique;
        `vectors` result from `vectors`, in their order."""


neighbours: Registry[Neighbours] = Registry("neighbours")


def make_neighbours(source: str) -> Neighbours:
    """Make the choice of NAME or NAME:ARGUMENT. Raises ValueError."""
    name, colon, argument = source.partition(":")
    choice = neighbours[neighbours.check(name)]
    try:
        return choice.from_argument(argument if colon else None)
    except ValueError as error:
        raise ValueError(f"neighbours {name}: {error}") from None


@neighbours.register("embedding", "by embeddings of sentence-transformers (embedding:MODEL for another than MiniLM)")
class EmbeddingNeighbours(Neighbours):
    """Highest cosine similarity, by exhaustive search (FAISS); ties go to the earlier document."""

    def __init__(self, encoder: TextEncoder | None = None) -> None:
        self._encoder = encoder or TextEncoder()

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        if argument == "":
            raise ValueError("give a model after the colon, or leave out the colon")
        return cls(TextEncoder(argument))

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        return self._encoder.encode(texts)

    def nearest(self, ids: Sequence[str], vectors: NDArray[np.float32] | None, count: int) -> list[list[int]]:
        if vectors is None or len(vectors) != len(ids):
            raise ValueError(f"{len(ids)} documents need one vector each, got {0 if vectors is None else len(vectors)}")
        if len(ids) < 2 or count < 1:
            return [[] for _ in ids]
        with needs("retrieval", "a search for neighbours"):
            import faiss
            import numpy as np
        unit = np.array(vectors, dtype=np.float32, order="C")
        if not np.isfinite(unit).all():
            raise ValueError("vectors must be finite numbers")
        faiss.normalize_L2(unit)
        index = faiss.IndexFlatIP(unit.shape[1])
        index.add(unit)
        # Each document also finds itself.
        scores, places = index.search(unit, min(count + 1, len(ids)))
        order = np.lexsort((places, -scores), axis=1)
        ranked = np.take_along_axis(places, order, axis=1).tolist()
        return [[other for other in row if other != place][:count] for place, row in enumerate(ranked)]


_EXAMPLE = '{"id": "a", "neighbours": ["b", "c"]}'


class _Vertex(BaseModel):
    id: str
    neighbours: list[str]


@neighbours.register("graph", 'from a graph (graph:FILE, JSON lines {"id", "neighbours"}, nearest first)')
class GivenNeighbours(Neighbours):
    """Ids outside the corpus are ignored."""

    def __init__(self, graph: Mapping[str, Sequence[str]]) -> None:
        self._graph = graph

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
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
        places = {id: place for place, id in enumerate(ids)}
        if ids and not places.keys() & self._graph.keys():
            raise ValueError(f"the graph has none of the {len(ids)} documents: give the graph of this corpus")
        found: list[list[int]] = []
        for id in ids:
            known = dict.fromkeys(other for other in self._graph.get(id, ()) if other in places and other != id)
            found.append([places[other] for other in known][:count])
        return found


@neighbours.register("vectors", "by your own vectors (vectors:FILE.npy, one row per document)")
class VectorNeighbours(EmbeddingNeighbours):
    def __init__(self, given: NDArray[np.float32]) -> None:
        if given.ndim != 2:
            raise ValueError(f"vectors must have the shape (documents, dimensions), got {given.shape}")
        self._given = given

    @classmethod
    def from_argument(cls, argument: str | None) -> Self:
        if not argument:
            raise ValueError("give the file of the vectors: vectors:FILE.npy")
        with needs("retrieval", "a file of vectors"):
            import numpy as np
        try:
            # Pickles are refused: they run code.
            given = np.load(Path(argument), allow_pickle=False)
            return cls(np.asarray(given, dtype=np.float32))
        except (OSError, ValueError, TypeError, EOFError) as error:
            raise ValueError(f"{argument} has no vectors ({error}): write them with numpy.save") from None

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        if len(texts) != len(self._given):
            raise ValueError(
                f"there are {len(self._given)} vectors for {len(texts)} documents: give one per document, in order"
            )
        return self._given


class PreprocessingSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    neighbours: int = Field(
        default=10, ge=0, description="Similar documents to compute each document after; 0: only the system prompt."
    )
    batch_documents: int = Field(default=10, ge=1, description="Documents computed together.")
    host_bytes: int = Field(
        default=1 << 30, ge=0, description="Host memory for neighbours' KV; further KV is recomputed."
    )
