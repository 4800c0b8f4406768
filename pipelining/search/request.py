"""A search as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.search.history import History
from ragorder.pipelining.staged._faiss import load_faiss, read_k, read_queries
from ragorder.pipelining.staged._ivf import ClusterIndex, read_nprobe

__all__ = ["SearchRequest", "check_history", "one_row", "read_parameters"]


@dataclass(frozen=True, slots=True, eq=False)
class SearchRequest:
    """Checked arguments of a search. `selector` is translated to the ids of the IVF index; `params` keeps it alive."""

    queries: NDArray[np.float32]
    k: int
    nprobe: int
    slices: int
    history: History | None = None
    selector: Any = None
    params: Any = None

    @classmethod
    def read(
        cls, index: ClusterIndex, queries: Any, k: int, nprobe: int | None, params: Any, history: History | None = None
    ) -> Self:
        """`nprobe` holds where `params`, a faiss.SearchParametersIVF, are None. Raises TypeError for parameters of
        another class, ValueError for whatever else has no answer."""
        outer = index.core.outer
        # The search goes on while the caller uses its array for the next query.
        k, rows = read_k(k), read_queries(queries, outer.d).copy()
        if k > outer.ntotal:
            raise ValueError(f"k={k}, but the index has {outer.ntotal} vectors: ask for at most as many")
        index.check_settings()
        own_nprobe, selector = read_parameters(params)
        check_history(selector, history)
        nprobe = index.nprobe(nprobe if own_nprobe is None else own_nprobe)
        return cls(rows, k, nprobe, index.slices(len(rows)), history, index.core.selector(selector), params)


def one_row(query: Any) -> NDArray[Any]:
    """A query as an array of one row. Raises ValueError for several."""
    row = np.asarray(query)
    if row.ndim == 2 and len(row) != 1:
        raise ValueError(f"submit takes one query, got {len(row)}: use search")
    return row[None] if row.ndim == 1 else row


def check_history(selector: Any, history: History | None) -> None:
    """Raises ValueError for both."""
    if selector is not None and history is not None:
        raise ValueError("a search with a selector has no history: its ids may be others' secrets")


def read_parameters(params: Any) -> tuple[int | None, Any]:
    """nprobe and selector of a faiss.SearchParametersIVF; None for no parameters."""
    if params is None:
        return None, None
    name = type(params).__name__
    if not isinstance(params, load_faiss().SearchParametersIVF):
        raise TypeError(f"params must be faiss.SearchParametersIVF(nprobe=…, sel=…), got {name}")
    if params.max_codes:
        raise ValueError(f"params have max_codes={params.max_codes}, a limit across stages: set it to 0")
    if params.quantizer_params is not None:
        raise ValueError("params have quantizer_params, which stages do not pass on: set the quantizer itself")
    return read_nprobe(params.nprobe), params.sel
