"""Measurements of tiers, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from ragorder.adapters.tier_stats import SOURCES, TIERS
from ragorder.eval.tiering.results import ARMS, MOST_WORSE, REQUIRED, judge

__all__ = ["tiering_table"]

_FITS = {"device": "the device", "host": "the host", "beyond": "neither", "disk": "the disk"}


def tiering_table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """One row a cell, all seeds together, the requests behind the warm-up.

    The mean time with vLLM's prefix cache alone and with tiers, how many times shorter these make it, with its 95 %
    interval; and of all prompt tokens those that the prefix cache alone had, and with tiers device, host and disk.
    """
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        cells.setdefault(line["cell"]["tier"], []).append(line)
    seeds = ", ".join(str(seed) for seed in sorted({line["seed"] for line in lines}))
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title="Time to the first token, by what the working set fits",
        caption=(
            f"seeds {seeds}. Required: {REQUIRED:g} times shorter where the working set fits the host, at most "
            f"{MOST_WORSE:.0%} longer where it fits the device"
        ),
    )
    table.add_column("it fits", no_wrap=True)
    for heading in (
        "mean ms\nalone, tiers",
        "times shorter",
        "required",
        "hits %\nalone",
        "hits % tiers\nd., h., disk",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for tier, of_cell in cells.items():
        verdict = judge(tier, of_cell)
        style = {"met": "green", "not met": "bold red", "not decided": "yellow"}.get(verdict.met, "")
        alone, tiers = (_shares(of_cell, arm) for arm in ARMS)
        table.add_row(
            _FITS.get(tier, tier),
            f"{verdict.apc_ms:,.0f}, {verdict.tiers_ms:,.0f}",
            f"{verdict.ratio:.2f} \\[{verdict.low:.2f}, {verdict.high:.2f}]",
            f"[{style}]{verdict.met}[/]" if verdict.met else "–",
            f"{100 * alone['device']:.1f}",
            ", ".join(f"{100 * tiers[source]:.1f}" for source in TIERS),
        )
    return table


def _shares(lines: Sequence[Mapping[str, Any]], arm: str) -> dict[str, float]:
    """Of all prompt tokens, by source."""
    sums = dict.fromkeys(SOURCES, 0)
    for line in lines:
        if line["policy"] == arm:
            for source in SOURCES:
                sums[source] += line["sources"][source]
    every = max(1, sum(sums.values()))
    return {source: tokens / every for source, tokens in sums.items()}
