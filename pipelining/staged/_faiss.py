"""FAISS indexes without wrappers, and checked arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import index as as_int
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.common.extras import install_hint

SearchResult = tuple[NDArray[np.float32], NDArray[np.int64]]


def load_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"staged search needs faiss ({error}): {install_hint('retrieval')}", name="faiss") from error
    return faiss


@dataclass(frozen=True, slots=True)
class UnwrappedIndex:
    """The searching index and its wrappers, outermost first."""

    outer: Any
    index: Any
    wrappers: list[Any] = field(default_factory=list)

    def transform_queries(self, queries: NDArray[np.float32]) -> NDArray[np.float32]:
        for wrapper in self.wrappers:
            for number in range(wrapper.chain.size() if _transforms(wrapper) else 0):
                queries = wrapper.chain.at(number).apply(queries)
        return queries

    def selector(self, selector: Any) -> Any:
        for wrapper in self.wrappers:
            if selector is not None and not _transforms(wrapper):
                translated = load_faiss().IDSelectorTranslated(wrapper.id_map, selector)
                translated.selector = selector  # FAISS holds a bare pointer to it
                selector = translated
        return selector

    def ids(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        for wrapper in reversed(self.wrappers):
            if not _transforms(wrapper) and wrapper.id_map.size():
                # A new view each time: FAISS moves the table when ids are added.
                table = load_faiss().rev_swig_ptr(wrapper.id_map.data(), wrapper.id_map.size())
                ids = np.where(ids < 0, ids, table[ids])
        return ids


def unwrap(index: Any) -> UnwrappedIndex:
    faiss = load_faiss()
    if not isinstance(index, faiss.Index):
        raise TypeError(f"expected a FAISS index of float vectors, got {type(index).__name__}")
    wrappers = []
    core = faiss.downcast_index(index)
    while isinstance(core, faiss.IndexIDMap | faiss.IndexPreTransform):
        wrappers.append(core)
        core = faiss.downcast_index(core.index)
    return UnwrappedIndex(index, core, wrappers)


def read_queries(queries: Any, dimension: int) -> NDArray[np.float32]:
    array = np.ascontiguousarray(queries, dtype=np.float32)
    if np.ndim(queries) != 2 or array.shape[1] != dimension:
        raise ValueError(f"queries must have the shape (n, {dimension}), got {np.shape(queries)}")
    return array


def read_k(k: int) -> int:
    if as_int(k) < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return as_int(k)


def _transforms(wrapper: Any) -> bool:
    return isinstance(wrapper, load_faiss().IndexPreTransform)
