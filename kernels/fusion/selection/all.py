"""Full attention: everything is recomputed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection.base import Needs, SelectionFacts, selections

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AllTokens"]


@selections.register("all", "all tokens, whatever the budget: full attention")
class AllTokens:
    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return facts.reused
