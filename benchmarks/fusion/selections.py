"""Selections to compare with, no better than reuse without any."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from ragorder.kernels.fusion.selection import Measurements, Needs, top

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DocumentHeads:
    """The first tokens of each document, the same number of each (EPIC). Unused shares of short documents go to the
    others."""

    needs: Needs = "nothing"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        begins = measurements.reused.new_tensor([begin for begin, _ in measurements.spans])
        documents = (measurements.reused[:, None] >= begins).sum(1) - 1
        return top(measurements, (begins[documents] - measurements.reused).float(), budget)


@dataclass(frozen=True)
class RandomTokens:
    """Random tokens, the same for documents at the same positions. A larger budget adds to those of a smaller one."""

    needs: Needs = "nothing"

    def choose(self, measurements: Measurements, budget: int) -> Tensor:
        places = list(range(len(measurements.reused)))
        Random(repr(measurements.spans)).shuffle(places)
        return measurements.reused[measurements.reused.new_tensor(sorted(places[: max(0, budget)]))]
