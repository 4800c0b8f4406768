"""Batches of a fixed size."""

from __future__ import annotations

from ragorder.pipelining.batching.batchers.base import Backlog

__all__ = ["StaticBatch"]


class StaticBatch:
    """Batches of a fixed size, smaller ones only where fewer requests wait: the baseline of RAGDoll's Table 2. Raises
    ValueError for a size below 1."""

    def __init__(self, most: int) -> None:
        if most < 1:
            raise ValueError(f"a batch takes at least 1 request, got {most}")
        self.most = most

    def size(self, backlog: Backlog) -> int:
        return min(self.most, backlog.unfinished)

    def learn(self, size: int, seconds: float) -> None:
        """Nothing depends on times."""
