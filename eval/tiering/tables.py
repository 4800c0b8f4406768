"""Measurements of tiers, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ragorder.eval.tiering.results import MOST_WORSE, REQUIRED, judge

__all__ = ["tiering_table"]

_WHERE = {
    "device": "fits the device",
    "host": "fits the host",
    "beyond": "fits neither",
    "disk": "fits the disk",
}
_SOURCES = ("device", "host", "disk", "computed")


def tiering_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """One row a cell, all seeds together, the requests behind the warm-up.

    Shorter: how many times shorter tiers make the mean time to the first token, with its 95 % interval. Behind it, of
    all prompt tokens, the shares that came from each tier.
    """
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        cells.setdefault(line["cell"]["tier"], []).append(line)
    seeds = ", ".join(str(seed) for seed in sorted({line["seed"] for line in lines}))
    table = Table(
        title="Time to the first token with tiers beside vLLM's prefix cache alone",
        caption=(
            f"seeds {seeds}. Required: {REQUIRED:g} times shorter where the working set fits the host, at most "
            f"{MOST_WORSE:.0%} longer where it fits the device"
        ),
    )
    table.add_column("the working set", no_wrap=True)
    headings = ["mean ms\nprefix cache", "mean ms\ntiers", "times\nshorter", "", "prefix cache\nhits"]
    headings += [f"tiers:\n{source}" for source in _SOURCES]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for tier, of_cell in cells.items():
        verdict = judge(tier, of_cell)
        style = {"met": "green", "not met": "bold red", "not decided": "yellow"}.get(verdict.met, "")
        met = f"[{style}]{verdict.met}[/]" if verdict.met else ""
        plain, tiers = (_shares(of_cell, arm) for arm in ("apc", "tiers"))
        table.add_row(
            _WHERE.get(tier, tier),
            f"{verdict.apc_ms:,.0f}",
            f"{verdict.tiers_ms:,.0f}",
            f"{verdict.ratio:.2f} \\[{verdict.low:.2f}, {verdict.high:.2f}]",
            met,
            f"{plain['device']:.1%}",
            *(f"{tiers[source]:.1%}" for source in _SOURCES),
        )
    return table


def _shares(lines: Sequence[Mapping[str, Any]], arm: str) -> dict[str, float]:
    sums = dict.fromkeys(_SOURCES, 0)
    for line in lines:
        if line["policy"] == arm:
            for source in _SOURCES:
                sums[source] += line["sources"][source]
    every = max(1, sum(sums.values()))
    return {source: tokens / every for source, tokens in sums.items()}
