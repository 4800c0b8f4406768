"""Costs of hardware that is not at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["EngineCosts", "SearchCosts"]


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """A step takes step_s + prefill_token_s x prompt tokens + context_token_s x context of all that decode.

    `token_budget`: prompt tokens of a step; `max_requests` run at a time, in a cache of `capacity_tokens`.
    """

    step_s: float
    prefill_token_s: float
    context_token_s: float
    capacity_tokens: int | None = None
    token_budget: int = 8192
    max_requests: int = 256

    def seconds(self, prompt_tokens: int, context_tokens: int) -> float:
        return self.step_s + self.prefill_token_s * prompt_tokens + self.context_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class SearchCosts:
    """A search of an index of `vectors` in `clusters`, on `busy_cores` at a time: all of them, or as many as memory has
    bandwidth for. `code_s`: a vector on one core; `piece_s`: of a piece beside its scan.

    An index of real vectors stands for the large one: each of its vectors counts for many.
    """

    code_s: float
    vectors: int
    clusters: int
    busy_cores: int
    piece_s: float = 2e-4

    def code_of(self, index: Any) -> float:
        """Seconds that one vector of the real index stands for."""
        return self.code_s * self.vectors / int(index.ntotal)

    def whole_s(self, searches_s: Sequence[float], *, dealt: bool = False) -> float:
        """Of a batch, in which each search has one core, or all of them together (`dealt`)."""
        shared_s = sum(searches_s) / self.busy_cores
        return shared_s if dealt else max(max(searches_s), shared_s)

    def piece_seconds(self, core_s: float) -> float:
        """Of a piece, whose clusters are dealt out to all cores."""
        one_cluster_s = self.code_s * self.vectors / self.clusters
        return self.piece_s + max(one_cluster_s, core_s / self.busy_cores)
