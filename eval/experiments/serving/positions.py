"""Pictures of cached shares by moved documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragorder.eval.experiments.serving.sweeps import panels_of, value_on_axis
from ragorder.eval.report.canvas import Picture, Style, draw, label_ends, name_marks, style, titled
from ragorder.eval.report.groups import Group
from ragorder.eval.report.metrics import CACHED, PLACES, SHARE_MOVED, Metric
from ragorder.eval.report.words import figure, policy_words

__all__ = ["positions"]


def positions(groups: Sequence[Group], x: str | None) -> list[Picture]:
    """Cached share by distance and by share of moved documents: a point for each policy at each `x`, a picture for each
    combination of the other parameters."""
    panels = panels_of(groups, x) if x is not None else [("", list(groups))]
    found = (_picture(panel, x, others, metric) for others, panel in panels for metric in (PLACES, SHARE_MOVED))
    return [picture for picture in found if picture is not None]


def _picture(groups: Sequence[Group], swept: str | None, others: str, metric: Metric) -> Picture | None:
    points = [
        (x, y, policy, group.label if swept is None else value_on_axis(swept, group.cell.get(swept)))
        for group in groups
        for policy in group.policies
        if (x := group.value(policy, metric)) is not None and (y := group.value(policy, CACHED)) is not None
    ]
    if not any(x for x, *_ in points):
        return None
    policies = list(dict.fromkeys(policy for *_, policy, _ in points))
    named = "auto" if "auto" in policies else policies[-1]

    def paint(axes: Any) -> None:
        ends: list[tuple[float, float, str, Style]] = []
        for x, y, policy, label in points:
            looks = style(policy)
            axes.plot(x, y, looks.marker, color=looks.colour, markersize=7, alpha=0.85, clip_on=False)
            if label and policy == named:
                ends.append((x, y, label, looks))
        axes.set_xlim(left=0)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        axes.set_xlabel(metric.heading)
        axes.set_ylabel(CACHED.heading)
        name_marks(axes, policies)
        label_ends(axes, ends)

    said = "; ".join(f"{label} {policy_words(p)}: {figure(x, 2)}, {figure(y)} %".strip() for x, y, p, label in points)
    return draw(
        paint,
        title=titled("How far documents move" if metric is PLACES else "How many documents move", others),
        alt=said,
        caption=f"What a move buys: higher is more cached, further left is less moved. Named: {policy_words(named)}.",
        height=3.8,
    )
