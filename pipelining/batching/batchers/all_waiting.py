"""Batches of everything that waits."""

from __future__ import annotations

from ragorder.pipelining.batching.batchers.base import Backlog

__all__ = ["AllWaiting"]


class AllWaiting:
    """Batches of all requests that wait, at most `most`: for retrieval, where a pass over the partitions costs the same
    for any number of queries (RAGDoll section 4.4). Raises ValueError for a `most` below 1."""

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 1:
            raise ValueError(f"most must be at least 1, or None, got {most}")
        self.most = most

    def size(self, backlog: Backlog) -> int:
        return backlog.unfinished if self.most is None else min(self.most, backlog.unfinished)

    def learn(self, size: int, seconds: float) -> None:
        """Nothing depends on times."""
