"""Selection by inter-attention (Cache-Craft)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection.base import Needs, SelectionFacts, selections, top

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["InterAttention"]


@selections.register("inter", "tokens that attended most to other documents when their KV was computed (Cache-Craft)")
class InterAttention:
    # Cache-Craft also gives each document a budget of its own, by the predecessors that it has lost. Here one budget is
    # shared by all documents, as in FusionRAG's comparison of ratios.
    needs: Needs = "copies"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return top(facts, facts.measured("inter"), budget)
