"""Prompts that each policy reorders, beside what that finds in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragorder.eval.report.canvas import LINE, Picture, draw, name_marks, style
from ragorder.eval.report.groups import Group
from ragorder.eval.report.metrics import BEST_MOVED, CACHED, PLACES, REORDERED, REORDERED_COLD
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number, policy_words
from ragorder.eval.running.record import RunRecord

_PREFIX = "prefix"


_SHORT = ("cached\n%", "reordered\n%", "nothing\ncached %", "best not\nfirst %", "places\nmoved", "saved\neach")


def moves_table(groups: Sequence[Group], baseline: str, *, short: bool = False) -> Table:
    """A row for each policy in each cell: what is cached, what moves, and the tokens that each move has saved. `short`
    headings fit a terminal."""
    headings = [
        CACHED.heading,
        REORDERED.heading,
        REORDERED_COLD.heading,
        BEST_MOVED.heading,
        PLACES.heading,
        "tokens saved for each reordered prompt",
    ]
    table = Table("What moves, and what it saves", ["", "policy", *(_SHORT if short else headings)], labels=2)
    for group in groups:
        for policy in group.policies:
            shares = [format_number(group.value(policy, m)) for m in (CACHED, REORDERED, REORDERED_COLD, BEST_MOVED)]
            places = format_number(group.value(policy, PLACES), 2)
            entries = [*shares, places, format_number(_saved(group, policy, baseline), 0)]
            table.rows.append([Entry(group.label), *map(Entry, (policy_words(policy), *entries))])
    table.note = (
        "Saved: cached tokens beyond retrieval order, for each prompt with a document that moves. With nothing cached: "
        "of all prompts."
    )
    return table


def _saved(group: Group, policy: str, baseline: str) -> float | None:
    reordered = gained = 0.0
    for ours, theirs in zip(group.runs(policy), group.runs(baseline), strict=False):
        moved, cached, before = _sum(ours, "reordered"), _sum(ours, "cached_tokens"), _sum(theirs, "cached_tokens")
        if moved is None or cached is None or before is None:
            return None
        reordered, gained = reordered + moved, gained + cached - before
    return gained / reordered if reordered else None


def _sum(run: RunRecord, name: str) -> float | None:
    """Of the requests that have it."""
    import numpy as np

    column = run.column(name)
    return None if column is None else float(np.nansum(column))


def moves_picture(groups: Sequence[Group]) -> Picture | None:
    """The gain of each policy beyond the cached prefix alone, against the prompts that it reorders beyond that."""
    points: list[dict[str, tuple[float, float]]] = []
    for group in groups:
        known = {p: (group.value(p, REORDERED), group.value(p, CACHED)) for p in group.policies}
        whole = {p: (x, y) for p, (x, y) in known.items() if x is not None and y is not None}
        if _PREFIX in whole:
            x0, y0 = whole[_PREFIX]
            points.append({p: (x - x0, y - y0) for p, (x, y) in whole.items() if p in (_PREFIX, "earned", "free")})
    if not any(len(each) > 1 for each in points):
        return None

    def paint(axes: Any) -> None:
        for each in points:
            ends = [each[policy] for policy in ("earned", "free") if policy in each]
            axes.plot(*zip(*ends, strict=True), color=LINE, linewidth=1, zorder=1)
            for policy, (x, y) in each.items():
                axes.plot(x, y, style(policy).marker, color=style(policy).colour, markersize=6, alpha=0.9)
        axes.set_xlabel("prompts reordered beyond prefix, points")
        axes.set_ylabel("cached beyond prefix, points")
        name_marks(axes, [policy for policy in (_PREFIX, "earned", "free") if any(policy in each for each in points)])

    said = "; ".join(
        f"{group.label}: {', '.join(f'{p} {y:+.1f} for {x:+.1f}' for p, (x, y) in each.items())}"
        for group, each in zip(groups, points, strict=False)
    )
    return draw(
        paint,
        title="What moves on a forecast gain, and how many prompts they reorder",
        alt=said,
        caption="A line for each stream, from earned to free moves. Left and up is better.",
        height=3.6,
    )
