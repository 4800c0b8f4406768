"""Tokens of batches whose requests share documents, by batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ragorder.pipelining.placement import Curve

__all__ = ["shared_tokens"]

R = TypeVar("R")


def shared_tokens(requests: Sequence[R], kv_tokens: Callable[[Sequence[R]], int], batches: Iterable[int]) -> Curve:
    """The most KV tokens of any `batch` consecutive requests, for each size: `Workload.shared`.

    - `requests`: past ones, in order of arrival
    - `kv_tokens`: of a batch, such as `TrieKV`, which counts the trie of `trie.plan`

    Sizes beyond the number of requests are left out. Raises ValueError for no requests, or sizes below 1.
    """
    sizes = sorted(set(batches))
    if not requests or not sizes or sizes[0] < 1:
        raise ValueError(f"requests and sizes of 1 or more are needed, got {len(requests)} requests and sizes {sizes}")
    points: list[tuple[int, int]] = []
    for size in (size for size in sizes if size <= len(requests)):
        # Windows that overlap by half: as many as whole batches, twice.
        starts = range(0, len(requests) - size + 1, max(1, size // 2))
        most = max(kv_tokens(requests[start : start + size]) for start in starts)
        points.append((size, max(most, points[-1][1] if points else 0)))
    return tuple(points)
