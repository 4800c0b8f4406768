"""Selections of critical tokens: which of the reused tokens are recomputed. Importing it needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, Protocol

from ragorder.trie.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "SELECTIONS",
    "AllTokens",
    "DocumentHeads",
    "KVDeviation",
    "Needs",
    "NoTokens",
    "QueryGuided",
    "RandomTokens",
    "Selection",
    "SelectionFacts",
    "make_selection",
    "selections",
    "top",
]

Needs = Literal["nothing", "question", "two layers"]
"""What is measured first: nothing, `attention` or `deviation`."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectionFacts:
    """A prompt's N tokens that were taken over, and what was measured of each.

    - `reused` int64 (N,): their positions, ascending; `spans`: begin and end of their documents, ascending.
    - `attention` fp32 (N,): the question's in the last layer, softmax over all KV, summed over its tokens, mean over
      heads.
    - `deviation` fp32 (N,): squared deviation of key and value from full attention's in the second layer.
    - `seed`: a digest of the prompt.

    Raises ValueError for another number of measurements.
    """

    reused: Tensor
    spans: Sequence[tuple[int, int]]
    attention: Tensor | None = None
    deviation: Tensor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("attention", "deviation"):
            measured = getattr(self, name)
            if measured is not None and measured.shape != self.reused.shape:
                raise ValueError(f"{name} is {tuple(measured.shape)}: give {tuple(self.reused.shape)}, one a token")

    def measured(self, name: Literal["attention", "deviation"]) -> Tensor:
        """Raises ValueError if it was not."""
        found: Tensor | None = getattr(self, name)
        if found is None:
            raise ValueError(f"{name} was not measured: a selection's `needs` says what it needs")
        return found


class Selection(Protocol):
    """Which of the tokens taken over are recomputed (FusionRAG 3.2)."""

    needs: Needs

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        """Positions int64, ascending, of at most `budget` tokens of `facts.reused`; `all` gives all of them."""


def top(facts: SelectionFacts, scores: Tensor, budget: int) -> Tensor:
    """The positions with the highest scores (N,), of equal ones the first. NaN is lowest."""
    known = scores.masked_fill(scores.isnan(), float("-inf"))
    order = known.sort(descending=True, stable=True).indices
    return facts.reused[order[: max(0, budget)].sort().values]


selections: Registry[Selection] = Registry("selection")


@selections.register("all", "all tokens, whatever the budget: full attention")
class AllTokens:
    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return facts.reused


@selections.register(
    "deviation", "tokens whose KV deviates most from full attention's in the second layer (CacheBlend)"
)
class KVDeviation:
    needs: Needs = "two layers"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return top(facts, facts.measured("deviation"), budget)


@selections.register("head", "the first tokens of each document, of each as many (EPIC)")
class DocumentHeads:
    """What a short document leaves of its part goes to the others."""

    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        begins = facts.reused.new_tensor([begin for begin, _ in facts.spans])
        documents = (facts.reused[:, None] >= begins).sum(1) - 1
        return top(facts, (begins[documents] - facts.reused).float(), budget)


@selections.register("none", "no tokens, whatever the budget: full reuse")
class NoTokens:
    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return facts.reused[:0]


@selections.register("query", "tokens that the question attends to most in the last layer (FusionRAG)")
class QueryGuided:
    needs: Needs = "question"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return top(facts, facts.measured("attention"), budget)


@selections.register("random", "any tokens, of a prompt always the same")
class RandomTokens:
    """A larger budget adds to the tokens of a smaller one."""

    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        places = list(range(len(facts.reused)))
        Random(facts.seed).shuffle(places)
        return facts.reused[facts.reused.new_tensor(sorted(places[: max(0, budget)]))]


SELECTIONS = tuple(selections.names)


def make_selection(name: str) -> Selection:
    """Return the selection of this name. Raises ValueError naming the choices."""
    return selections[selections.check(name)]()
