"""Pictures of lines that are named where they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragorder.eval.report.canvas import LINE, Picture, draw, label_ends, style
from ragorder.eval.report.words import policy_words

# Looks of lines that are no policies.
_LOOKS = ("earned", "greedy", "sorted", "prefix", "recency")


def draw_lines(
    title: str,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    alt: str,
    caption: str = "",
    looks: Mapping[str, str] | None = None,
    words: Mapping[str, str] | None = None,
    ticks: Sequence[str] | None = None,
    level: float | None = None,
    adjust: Callable[[Any], object] = lambda axes: None,
) -> Picture:
    """Return a picture of the points of each line, and a thin line at a `level`. Lines have the `looks` of policies, by
    default spare ones; {}: each that of its own name."""
    chosen = dict(zip(lines, _LOOKS, strict=False)) if looks is None else looks

    def paint(axes: Any) -> None:
        if level is not None:
            axes.axhline(level, color=LINE, linewidth=1.2)
        ends = []
        for name, points in lines.items():
            look = style(chosen.get(name, name))
            axes.plot(*zip(*points, strict=True), look.dashes, marker=look.marker, markersize=4, color=look.colour)
            ends.append((*points[-1], (words or {}).get(name, policy_words(name)), look))
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if ticks is not None:
            axes.set_xticks(range(len(ticks)), ticks)
            axes.grid(axis="x", visible=False)
        adjust(axes)
        label_ends(axes, ends)

    return draw(paint, title=title, alt=alt, caption=caption)


def from_zero(axes: Any) -> None:
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
