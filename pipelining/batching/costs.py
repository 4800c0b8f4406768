"""Costs of a placement: what `plan_placement` compares placements by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ragorder.pipelining.placement import IndexSizes, ModelSizes, Spread, Workload

__all__ = ["PlacementCosts", "mean_latency_s"]


class PlacementCosts(Protocol):
    """Sizes and times of one model and index on one machine; `PlacementProfile` has measured ones, `EstimatedCosts`
    others."""

    @property
    def model(self) -> ModelSizes: ...

    @property
    def index(self) -> IndexSizes: ...

    @property
    def workload(self) -> Workload: ...

    @property
    def estimated(self) -> bool:
        """Nothing of it was measured."""

    @property
    def batches(self) -> Sequence[int]:
        """Sizes to choose from."""

    @property
    def step_tokens(self) -> int:
        """Of the largest step; fewer where memory is short."""

    def generation_s(self, batch: int, weights: Spread, step_tokens: int) -> float:
        """Of a batch from its first step to its last token, with so many layers in each place."""

    def retrieval_s(self, partitions: int) -> float:
        """Of a batch of any size that passes over all partitions, so many of them resident."""


def mean_latency_s(backlog: int, batch: int, retrieval_s: float, generation_s: Callable[[int], float]) -> float:
    """Mean seconds until `backlog` waiting requests are answered, in batches of `batch`, the last one of what is left.

    A batch is retrieved while the one before it generates. Without retrieval this is Eq. 6 of RAGDoll; with many
    batches it grows by max(t_retrieval, t_generation) for each, which is what section 4.4 balances.
    """
    retrieved_s = answered_s = sum_s = 0.0
    left, size, seconds = backlog, min(batch, backlog), generation_s(min(batch, backlog))
    while left:
        if left < size:
            size, seconds = left, generation_s(left)
        retrieved_s += retrieval_s
        answered_s = max(retrieved_s, answered_s) + seconds
        sum_s += size * answered_s
        left -= size
    return sum_s / backlog
