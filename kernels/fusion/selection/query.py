"""Query-guided selection, FusionRAG's own (section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection.base import Needs, SelectionFacts, selections, top

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["QueryGuided"]


@selections.register("query", "tokens that the question attends to most in the last layer (FusionRAG)")
class QueryGuided:
    needs: Needs = "question"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return top(facts, facts.measured("attention"), budget)
