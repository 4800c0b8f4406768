"""Random tokens: the baseline of all selections."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection.base import Needs, SelectionFacts, selections

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RandomTokens"]


@selections.register("random", "any tokens, of a prompt always the same")
class RandomTokens:
    """A larger budget adds to the tokens of a smaller one."""

    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        places = list(range(len(facts.reused)))
        Random(facts.seed).shuffle(places)
        return facts.reused[facts.reused.new_tensor(sorted(places[: max(0, budget)]))]
