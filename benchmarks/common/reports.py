"""Pictures of tables, and intervals in words, for reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ragorder.eval.report.canvas import Picture
from ragorder.eval.report.lines import draw_lines, from_zero
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import NO_INTERVAL, format_number


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


def interval_words(
    comparison: PairedDifference, decimals: int = 1, scale: Callable[[float], float] = lambda difference: difference
) -> str:
    if not comparison.known:
        return NO_INTERVAL
    low, high = sorted(map(scale, (comparison.low, comparison.high)))
    return f"[{format_number(low, decimals)}, {format_number(high, decimals)}]"
