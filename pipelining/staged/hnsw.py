"""Staged HNSW search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import index as as_int
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import load_faiss, read_k, read_queries, unwrap
from ragorder.pipelining.staged.base import Stage

_FACTOR = 4


class StagedHNSW:
    """Searches an HNSW index with growing efSearch; the last stage equals `index.search`.

        for stage in StagedHNSW(index, stages=3).search(queries, k=5):
            print(stage.number, stage.ids)

    - `index`: a FAISS HNSW index, bare or wrapped as for `StagedIVF`
    - `ef_search`: of the last stage (default: the index's own)
    - `stages`: each with four times the efSearch of the last one, or the `schedule`

    FAISS cannot resume a traversal, as RAGCache does: each stage starts over.
    """

    def __init__(
        self, index: Any, ef_search: int | None = None, *, stages: int = 3, schedule: Sequence[int] | None = None
    ) -> None:
        self._core = unwrap(index)
        if not isinstance(self._core.index, load_faiss().IndexHNSW):
            raise TypeError(
                f"StagedHNSW searches HNSW indexes, got {type(self._core.index).__name__}: use StagedIVF for IVF, or "
                f"search it without stages"
            )
        self._schedule = None if schedule is None else tuple(as_int(ef) for ef in schedule)
        if self._schedule is not None:
            if not self._schedule or any(before >= after for before, after in pairwise((0, *self._schedule))):
                raise ValueError(f"schedule must hold growing efSearch of at least 1, got {self._schedule}")
            if ef_search not in (None, self._schedule[-1]):
                raise ValueError(
                    f"ef_search={ef_search}, but the last of schedule={self._schedule} is {self._schedule[-1]}"
                )
        if ef_search is not None and ef_search < 1:
            raise ValueError(f"ef_search must be at least 1, got {ef_search}")
        if stages < 1:
            raise ValueError(f"stages must be at least 1, got {stages}")
        self._ef_search, self._stages = ef_search, stages

    def search(self, queries: Any, k: int, *, selector: Any = None) -> Iterator[Stage]:
        k, rows = read_k(k), read_queries(queries, self._core.outer.d)
        schedule = self._schedule
        if schedule is None:
            target = self._core.index.hnsw.efSearch if self._ef_search is None else self._ef_search
            schedule = tuple(target // _FACTOR**left for left in reversed(range(self._stages)))
        return self._run(rows, k, sorted({max(k, ef) for ef in schedule}), selector)

    def _run(self, queries: NDArray[np.float32], k: int, schedule: list[int], selector: Any) -> Iterator[Stage]:
        faiss, index = load_faiss(), self._core.index
        queries, selector = self._core.transform_queries(queries), self._core.selector(selector)
        chosen = {} if selector is None else {"sel": selector}
        for number, ef_search in enumerate(schedule, 1):
            parameters = faiss.SearchParametersHNSW(
                efSearch=ef_search,
                check_relative_distance=index.hnsw.check_relative_distance,
                bounded_queue=index.hnsw.search_bounded_queue,
                **chosen,
            )
            distances, found = index.search(queries, k, params=parameters)
            yield Stage(number, len(schedule), self._core.ids(found), distances)
