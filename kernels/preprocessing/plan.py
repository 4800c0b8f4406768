"""Plan of each document's neighbours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ragorder.kernels.preprocessing.manifest import BuildError, PlannedDocument
from ragorder.kernels.preprocessing.neighbours import Neighbours

__all__ = ["Planner", "SourceDocument"]


class SourceDocument(NamedTuple):
    id: str
    text: str
    token_ids: Sequence[int]


class Planner:
    """Plans documents with at most `count` neighbours, which fit into `most_tokens` together with the document."""

    def __init__(
        self, neighbours: Neighbours, count: int, most_tokens: int, content: Callable[[Sequence[int]], bytes]
    ) -> None:
        self._neighbours = neighbours
        self._count = count
        self._most_tokens = most_tokens
        self._content = content

    def read(self, documents: Sequence[SourceDocument]) -> list[PlannedDocument]:
        """Return the documents without neighbours. Raises BuildError."""
        counts = Counter(document.id for document in documents)
        _refuse((id for id, count in counts.items() if count > 1), "occurs twice: give every document its own id")
        _refuse((each.id for each in documents if not len(each.token_ids)), "has no tokens: leave it out")
        _refuse(
            (each.id for each in documents if len(each.token_ids) > self._most_tokens),
            f"has more than the {self._most_tokens:,} tokens that fit after the system prompt: split it, or leave it "
            "out",
        )
        vectors = self._neighbours.vectors([document.text for document in documents]) if documents else None
        kept = [None] * len(documents) if vectors is None else [np.float32(vector).tobytes() for vector in vectors]
        return [
            PlannedDocument(document.id, self._content(document.token_ids), document.token_ids, (), vector)
            for document, vector in zip(documents, kept, strict=True)
        ]

    def choose(self, documents: Sequence[PlannedDocument]) -> list[PlannedDocument]:
        nearest = self._neighbours.nearest([each.id for each in documents], _vectors(documents), self._count)
        chosen: dict[bytes, tuple[bytes, ...]] = {}
        for document, places in zip(documents, nearest, strict=True):
            # Documents with the same tokens share their KV.
            if document.content not in chosen:
                chosen[document.content] = self._fitting(document, [documents[place] for place in places])
        return [replace(document, neighbours=chosen[document.content]) for document in documents]

    def _fitting(self, document: PlannedDocument, neighbours: Iterable[PlannedDocument]) -> tuple[bytes, ...]:
        left = self._most_tokens - len(document.token_ids)
        fitting: list[bytes] = []
        for other in neighbours:
            if len(other.token_ids) <= left and other.content not in (document.content, *fitting):
                fitting.append(other.content)
                left -= len(other.token_ids)
        return tuple(fitting)


def _vectors(documents: Sequence[PlannedDocument]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]] | None:
    vectors = [document.vector for document in documents]
    if all(vector is None for vector in vectors):
        return None
    if len({len(vector or b"") for vector in vectors}) > 1:
        raise BuildError("documents have vectors of different models: build again, with one choice of neighbours")
    return np.stack([np.frombuffer(vector or b"", dtype=np.float32) for vector in vectors])


def _refuse(ids: Iterable[str], problem: str) -> None:
    found = list(ids)
    if found:
        others = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        raise BuildError(f"document {found[0]!r}{others} {problem}")
