"""Settings of fused requests, and selections of critical tokens, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
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
    seed: int = 0


class Selection(Protocol):
    """Which reused tokens are recomputed (FusionRAG 3.2)."""

    needs: Needs

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


@selections.register("head", "the first tokens of each document, the same number of each (EPIC)")
class DocumentHeads:
    """Unused shares of short documents go to the others."""

    needs: Needs = "nothing"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        begins = measurements.reused.new_tensor([begin for begin, _ in measurements.spans])
        documents = (measurements.reused[:, None] >= begins).sum(1) - 1
        return top(measurements, (begins[documents] - measurements.reused).float(), budget)


@selections.register("query", "tokens that the question attends to most in the last layer (FusionRAG)")
class QueryGuided:
    needs: Needs = "question"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        return top(measurements, measurements.scores, budget)


@selections.register("random", "random tokens, always the same for one prompt")
class RandomTokens:
    """A larger budget adds to the tokens of a smaller one."""

    needs: Needs = "nothing"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        places = list(range(len(measurements.reused)))
        Random(measurements.seed).shuffle(places)
        return measurements.reused[measurements.reused.new_tensor(sorted(places[: max(0, budget)]))]


SELECTIONS = tuple(selections.names)


def make_selection(name: str) -> Selection:
    return selections[selections.check(name)]()


@dataclass(frozen=True, slots=True)
class Fusion:
    """Reuse of documents after the cached prefix. `select` chooses the share of tokens to `recompute` (0: full reuse,
    1: full attention); in further `rounds` their attention chooses more."""

    recompute: float = 0.15
    select: str = "query"
    rounds: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is {self.recompute}: give a share of the reused tokens, from 0 to 1")
        if self.rounds < 1:
            raise ValueError(f"rounds is {self.rounds}: give 1 or more")
