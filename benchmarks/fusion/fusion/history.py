"""The course of a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from ragorder.benchmarks.fusion.fusion.batches import KINDS

if TYPE_CHECKING:
    from ragorder.benchmarks.fusion.fusion.training import Point

__all__ = ["History"]

_STEPS = 50


@dataclass(slots=True)
class History:
    """Means of so many steps each."""

    steps: int = 0
    rows: dict[str, list[float | None]] = field(default_factory=dict)
    _recent: list[Point] = field(default_factory=list)

    def take(self, advance: Callable[[], None]) -> Callable[[Point], None]:
        def keep(point: Point) -> None:
            self.steps += 1
            self._recent.append(point)
            if len(self._recent) == _STEPS:
                self.close()
            advance()

        return keep

    def close(self) -> None:
        """With what the last steps, fewer, had."""
        if not self._recent:
            return
        last, recent = self._recent[-1], self._recent
        self._recent = []
        row: dict[str, float | None] = {"seconds": round(last.seconds, 1), "tokens": last.tokens}
        row |= {"hops": last.hops, "documents": last.documents}
        for kind in KINDS:
            known = [point.right[kind] for point in recent if kind in point.right]
            row[kind] = round(fmean(known), 3) if known else None
        for name, value in row.items():
            self.rows.setdefault(name, []).append(value)
