"""Tables of the results, for the terminal and in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from ragorder.eval.experiments.attention.contenders import CONTENDERS
from ragorder.eval.experiments.attention.measuring import TOLERANCE, Row
from ragorder.eval.experiments.attention.shapes import Shape

__all__ = ["markdown", "missing_lines", "table"]

_HEADINGS = (
    "requests",
    "new",
    "cached",
    "heads",
    "D",
    "contender",
    "ms",
    "TFLOP/s",
    "GB/s",
    "of the fastest other",
    "error",
)


def table(rows: Sequence[Row]) -> Table:
    """For the terminal."""
    shown = Table(title="attention of new tokens to a paged prefix")
    for heading in _HEADINGS:
        shown.add_column(heading, justify="left" if heading == "contender" else "right")
    for cells in _lines(rows):
        shown.add_row(*cells)
    return shown


def missing_lines(rows: Sequence[Row]) -> list[str]:
    """Who was not there and why, and for how many shapes."""
    found = Counter((row.contender, row.missing) for row in rows if row.missing is not None)
    shapes = len({row.shape for row in rows})
    return [f"{name} is missing for {count} of {shapes} shapes: {why}" for (name, why), count in found.items()]


def markdown(rows: Sequence[Row], environment: dict[str, object], command: str, device: str, timed: bool) -> str:
    """A page: where and how it was measured, then the table."""
    first = rows[0].shape
    said = (
        "Medians from a cold L2; TFLOP/s count what the causal mask leaves, GB/s each byte once."
        if timed
        else "**Nothing was timed: there was no GPU.** Results were held against the reference, that is all."
    )
    lines = [
        f"# The attention kernel on {device}",
        "",
        f"`{command}`",
        "",
        f"{said} {first.dtype}, blocks of {first.block_size} tokens in random order. Every result was within"
        f" {TOLERANCE[first.dtype]} of the reference, or is called wrong.",
        "",
        ", ".join(f"{name}: {value}" for name, value in environment.items()),
        "",
        f"| {' | '.join(_HEADINGS)} |",
        f"|{'---|' * len(_HEADINGS)}",
        *(f"| {' | '.join(cells)} |" for cells in _lines(rows)),
        "",
        *(f"- {line}" for line in missing_lines(rows)),
        *(f"- {contender.name}: {contender.timed}" for contender in CONTENDERS),
        "",
    ]
    return "\n".join(lines)


def _lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [_cells(row, _fastest_other(row, rows)) for row in rows if row.missing is None]


def _fastest_other(row: Row, rows: Sequence[Row]) -> float | None:
    """The fastest other contender."""
    ours = row.contender.startswith("triton")
    times = [
        other.median_ms
        for other in rows
        if other.shape == row.shape
        and other.median_ms is not None
        and other.contender != row.contender
        and not (ours and other.contender.startswith("triton"))
    ]
    return min(times, default=None)


def _cells(row: Row, other_ms: float | None) -> tuple[str, ...]:
    shape = row.shape
    if not row.right:
        times = ["wrong", "", "", ""]
    elif row.median_ms is None:
        times = ["not timed", "", "", ""]
    else:
        relative = "" if other_ms is None else f"{other_ms / row.median_ms:.2f}x"
        times = [f"{row.median_ms:.3f}", f"{row.tflops:.0f}", f"{row.gbytes:.0f}", relative]
    error = "" if row.error is None else f"{row.error:.1e}"
    return (*_names(shape), row.contender, *times, error)


def _names(shape: Shape) -> tuple[str, ...]:
    heads = f"{shape.heads}/{shape.kv_heads}"
    return str(shape.batch), f"{shape.query:,}", f"{shape.context:,}", heads, str(shape.head_dim)
