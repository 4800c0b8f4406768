"""Selection by KV deviation (CacheBlend; FusionRAG's Eq. 8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection.base import Needs, SelectionFacts, selections, top

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KVDeviation"]


@selections.register(
    "deviation", "tokens whose KV deviates most from full attention's in the second layer (CacheBlend)"
)
class KVDeviation:
    needs: Needs = "two layers"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        return top(facts, facts.measured("deviation"), budget)
