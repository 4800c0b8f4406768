"""First tokens of each document (EPIC's LegoLink)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection.base import Needs, SelectionFacts, selections, top

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DocumentHeads"]


@selections.register("head", "the first tokens of each document, of each as many (EPIC)")
class DocumentHeads:
    """What a short document leaves of its part goes to the others."""

    needs: Needs = "nothing"

    def choose(self, facts: SelectionFacts, budget: int) -> Tensor:
        begins = facts.reused.new_tensor([begin for begin, _ in facts.spans])
        documents = (facts.reused[:, None] >= begins).sum(1) - 1
        return top(facts, (begins[documents] - facts.reused).float(), budget)
