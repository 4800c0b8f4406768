"""Settings of fused requests, and selections of critical tokens, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ragorder.trie.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

Needs = Literal["nothing", "question", "two layers"]
"""Scores to measure: none, the question's attention in the last layer, or the squared deviation of KV from full
attention's in the second layer."""


@dataclass(frozen=True, slots=True, eq=False)
class Measurements:
    """N reused tokens at positions `reused`, int64 (N,), ascending, of documents in `spans`. `scores` fp32 (N,) are
    what the selection `needs`."""

    reused: Tensor
    spans: Sequence[tuple[int, int]]
    scores: Tensor | None = None


class Selection(Protocol):
    """Which reused tokens are recomputed (FusionRAG 3.2)."""

    @property
    def needs(self) -> Needs: ...

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        """Return positions int64, ascending: at most `budget` of `measurements.reused`."""


def top(measurements: Measurements, scores: Tensor | None, budget: int) -> Tensor:
    """Return the positions with the highest scores (N,), of equal ones the first; NaN is lowest."""
    if scores is None or scores.shape != measurements.reused.shape:
        raise ValueError("give a score for each reused token: measure what the selection needs")
    known = scores.masked_fill(scores.isnan(), float("-inf"))
    order = known.sort(descending=True, stable=True).indices
    return measurements.reused[order[: max(0, budget)].sort().values]


selections: Registry[Selection] = Registry("selection")


@selections.register(
    "deviation", "tokens whose KV deviates most from full attention's in the second layer (CacheBlend)"
)
class KVDeviation:
    needs: Needs = "two layers"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        return top(measurements, measurements.scores, budget)


@selections.register("query", "tokens that the question attends to most in the last layer (FusionRAG)")
class QueryGuided:
    needs: Needs = "question"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        return top(measurements, measurements.scores, budget)


SELECTIONS = tuple(selections.names)


def make_selection(select: str | Selection) -> Selection:
    """Raises ValueError for an unknown name."""
    return selections[selections.check(select)]() if isinstance(select, str) else select


@dataclass(frozen=True, slots=True)
class Fusion:
    """Reuse of documents after the cached prefix. `select` chooses the share of tokens to `recompute` (0: full reuse,
    1: full attention), by one of `SELECTIONS` or your own; in further `rounds` their attention chooses more. Raises
    ValueError."""

    recompute: float = 0.15
    select: str | Selection = "query"
    rounds: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is {self.recompute}: give a share of the reused tokens, from 0 to 1")
        if type(self.rounds) is not int or self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: give a whole number, 1 or more")
        make_selection(self.select)
