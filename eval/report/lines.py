"""Pictures of lines that are named where they end, of points or of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragorder.eval.report.canvas import LINE, Picture, draw, label_ends, style
from ragorder.eval.report.tables import Table
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


def draw_table(table: Table, x: str, y: str, *, rows: Mapping[str, str]) -> Picture:
    """Return a picture of the numbers in these `rows` of a table along its columns, each with the look of a policy."""
    ticks = table.headings[table.labels :]
    lines: dict[str, list[tuple[float, float]]] = {}
    said = []
    for name, *entries in ([each.text for each in row] for row in table.rows):
        known = [(place, text) for place, text in enumerate(entries) if text not in ("", "–")]
        if name in rows and known:
            lines[name] = [(place, float(text.replace(",", ""))) for place, text in known]
            said.append(f"{name}: {', '.join(f'{ticks[place]} {text}' for place, text in known)}")

    alt = "; ".join(said)
    return draw_lines(table.title, lines, x, y, alt=alt, looks=rows, ticks=ticks, adjust=from_zero)


def from_zero(axes: Any) -> None:
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
