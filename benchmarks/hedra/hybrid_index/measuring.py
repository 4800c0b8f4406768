"""An index in a file with cold pages, and questions with a skew."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.hedra.locality.measuring import skew
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.search import IndexTiers
from ragorder.pipelining.staged._faiss import load_faiss

__all__ = ["ColdIndex", "hit_share_of", "latencies", "skewed_queries"]

Vectors = NDArray[np.float32]
_SHARE = 0.2
_MADV_RANDOM, _MADV_DONTNEED = 1, 4
_K = 1


class ColdIndex:
    """An IVF index mapped from a file, whose pages `cool` takes out of memory. What is not scanned is not read: a small
    file would be read ahead whole."""

    def __init__(self, index: Any, path: Path) -> None:
        faiss = load_faiss()
        faiss.write_index(index, str(path))
        self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        lists = faiss.downcast_InvertedLists(self.index.invlists)
        self._start, self._size = int(lists.ptr), int(lists.totsize)
        self._file = os.open(path, os.O_RDONLY)
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        os.fsync(self._file)
        self._advise(_MADV_RANDOM)

    def _advise(self, advice: int) -> None:
        if self._madvise(ctypes.c_void_p(self._start), ctypes.c_size_t(self._size), advice):
            raise OSError(ctypes.get_errno(), "madvise: this system does not let go of a file's pages")

    def cool(self) -> None:
        """Raises OSError where the system does not let go of them."""
        self._advise(_MADV_DONTNEED)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._file)


def skewed_queries(index: Any, count: int, share: float, seed: int) -> Vectors:
    """Near centroids, by a power law of their ranks, so that a fifth of the clusters has this share of the work."""
    centroids = index.quantizer.reconstruct_n(0, index.nlist)
    rng = np.random.default_rng(seed)
    ranks = 1.0 + np.random.default_rng(0).permutation(index.nlist)
    noise = 0.3 * centroids.std() * rng.standard_normal((count, index.d), np.float32)
    uniform = rng.random(count)

    def draw(power: float) -> Vectors:
        weights = np.cumsum(ranks**-power)
        near = centroids[np.searchsorted(weights / weights[-1], uniform)]
        return np.ascontiguousarray(near + noise, dtype=np.float32)

    low, high = 0.0, 3.0
    for _ in range(12):
        power = (low + high) / 2
        if skew(index, draw(power), [_SHARE])[f"{_SHARE:g}"] < share:
            low = power
        else:
            high = power
    return draw(high)


def latencies(
    index: Any, queries: Vectors, nprobe: int, tiers: IndexTiers | None, cool: Callable[[], None], warmup: int
) -> tuple[list[float], float]:
    """Milliseconds of each search, one after another, on one core; and the share of codes that the fast tier scanned
    after the warm-up."""
    found, before = [], (0, 0)
    with ContinuousIVF(index, nprobe=nprobe, cores=1, tiers=tiers, thread=False) as search:
        for number, query in enumerate(queries):
            cool()
            if tiers is not None and number == warmup:
                before = tiers.codes, tiers.fast_codes
            start_s = time.perf_counter()
            search.submit(query, _K).result()
            found.append(1e3 * (time.perf_counter() - start_s))
    return found, hit_share_of(tiers, before) if tiers is not None else 0.0


def hit_share_of(tiers: IndexTiers, before: tuple[int, int]) -> float:
    codes, fast_codes = tiers.codes - before[0], tiers.fast_codes - before[1]
    return fast_codes / codes if codes else 0.0
