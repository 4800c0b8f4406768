"""Values with their intervals, one row each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ragorder.eval.report.canvas import LINE, Picture, draw, style
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.words import signed

__all__ = ["Mark", "draw_marks"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A value with its interval (infinite: unknown), and that of each seed."""

    label: str
    value: float
    low: float = -math.inf
    high: float = math.inf
    seeds: Sequence[float] = ()
    policy: str = "earned"

    @classmethod
    def of(cls, label: str, policy: str, found: PairedDifference) -> Mark:
        """A difference in percentage points, or in per cent of the baseline."""
        scale = 100 if found.relative else 1
        low, high = (scale * end for end in (found.low, found.high))
        return cls(label, scale * found.difference, low, high, [scale * each for each in found.by_seed], policy)

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def shown(self) -> str:
        interval = f" [{signed(self.low)}, {signed(self.high)}]" if self.known else ""
        return f"{signed(self.value)}{interval}"


def draw_marks(
    marks: Sequence[Mark],
    *,
    title: str,
    axis: str,
    alt: str,
    caption: str,
    baseline: float | None = None,
    row_height: float = 0.42,
) -> Picture:
    """A picture of the intervals, the first on top, with a line at the baseline; without one the axis begins at 0."""

    def paint(axes: Any) -> None:
        if baseline is not None:
            axes.axvline(baseline, color=LINE, linewidth=1.2)
        for place, mark in enumerate(reversed(marks)):
            looks = style(mark.policy)
            if mark.known:
                axes.plot([mark.low, mark.high], [place, place], color=looks.colour, linewidth=5, alpha=0.35)
            axes.plot(mark.seeds, [place] * len(mark.seeds), "|", color=looks.colour, markersize=9)
            axes.plot(mark.value, place, looks.marker, color=looks.colour, markersize=7)
        axes.set_yticks(range(len(marks)), [mark.label for mark in reversed(marks)])
        axes.set_ylim(-0.6, len(marks) - 0.4)
        if baseline is None:
            axes.set_xlim(left=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(axis)

    return draw(paint, title=title, alt=alt, caption=caption, height=1.1 + row_height * len(marks))
