"""Protocol of selections of critical tokens, and their registry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from ragorder.trie.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Needs", "Selection", "SelectionFacts", "selections", "top"]

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
