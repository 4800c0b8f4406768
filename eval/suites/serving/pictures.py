"""The pictures of one suite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ragorder.eval.report.canvas import INK, LINE, Picture, draw, label_ends, name_marks, style, titled
from ragorder.eval.report.groups import Group
from ragorder.eval.report.metrics import CACHED
from ragorder.eval.report.words import format_number, policy_words
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.serving.latency import depth_by_time, distributions
from ragorder.eval.suites.serving.moves import moves_picture
from ragorder.eval.suites.serving.sweeps import panels_of, position_pictures, sweep_pictures, value_on_axis
from ragorder.eval.suites.serving.timelines import along, timelines

__all__ = ["pictures_of"]

_FEW_CELLS = 3


def pictures_of(suite: Suite, groups: Sequence[Group], baseline: str) -> list[Picture]:
    if not groups:
        return []
    found: list[Picture | None] = [*sweep_pictures(suite, groups, baseline)]
    if len(groups) <= _FEW_CELLS:
        for group in groups:
            found.append(_strategies(group, baseline))
            found += [distributions(group), *depth_by_time(group)] if group.has("ttft_ms") else [_depth(group)]
            found.append(along(group))
    elif not found:
        found.append(_cells(groups))
    if suite.about("moves"):
        found.append(moves_picture(groups))
    if suite.about("position", "moved_share", "displacement"):
        found += position_pictures(groups, suite.report.x)
    if len(groups) <= _FEW_CELLS:
        for group in groups:
            found += timelines(group.label, {policy: (policy, group, policy) for policy in group.policies})
    else:
        found += _swept_timelines(suite, groups)
    return [picture for picture in found if picture is not None]


def _swept_timelines(suite: Suite, groups: Sequence[Group]) -> list[Picture]:
    x = suite.report.x
    recorded = [group for group in groups if any(run.timeline for run in group.runs())]
    if x is None or not recorded:
        return []
    smallest = min(int(group.engine.get("capacity_tokens") or 1 << 60) for group in recorded)
    found = []
    for others, panel in panels_of(recorded, x):
        if int(panel[0].engine.get("capacity_tokens") or 1 << 60) == smallest:
            policy = next((each for each in ("free", "prefix", "greedy") if each in panel[0].policies), "retrieval")
            lines = {
                value_on_axis(x, group.cell.get(x)): (looks, group, policy)
                for group, looks in zip(panel, ("greedy", "free", "prefix", "sorted", "recency", "other"), strict=False)
            }
            found += timelines(f"{others}, {policy_words(policy)}, by {x.replace('_', ' ')}", lines)
    return found


def _strategies(group: Group, baseline: str) -> Picture | None:
    values = {policy: value for policy in group.policies if (value := group.value(policy, CACHED)) is not None}
    if not values:
        return None
    ordered = sorted(values, key=lambda policy: values[policy])
    top = max(values.values())

    def paint(axes: Any) -> None:
        for place, policy in enumerate(ordered):
            looks = style(policy)
            axes.plot(
                [0, values[policy]], [place, place], color=looks.colour, linewidth=5, alpha=0.35, solid_capstyle="butt"
            )
            axes.plot(values[policy], place, looks.marker, color=looks.colour, markersize=7)
            comparison = group.compare(policy, baseline, CACHED)
            if comparison and comparison.known:
                ends = [comparison.baseline + comparison.low, comparison.baseline + comparison.high]
                axes.plot(ends, [place, place], "|-", color=INK, linewidth=1.2, markersize=6)
            axes.annotate(
                f"{format_number(values[policy])} %",
                (max([values[policy], *(ends if comparison and comparison.known else [])]), place),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        axes.set_yticks(range(len(ordered)), [policy_words(policy) for policy in ordered])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="y", visible=False)
        axes.set_xlim(0, max(1.0, top * 1.22))
        axes.set_ylim(-0.6, len(ordered) - 0.4)
        axes.set_xlabel("cached, % of prompt tokens")

    said = ", ".join(f"{policy_words(policy)} {format_number(values[policy])} %" for policy in reversed(ordered))
    return draw(
        paint,
        title=titled("Cached tokens by strategy", group.label),
        alt=said,
        caption=f"Black: the 95 % interval of the paired difference to {policy_words(baseline)}.",
        height=max(1.6, 0.75 + 0.3 * len(ordered)),
    )


def _cells(groups: Sequence[Group]) -> Picture | None:
    policies = list(dict.fromkeys(policy for group in groups for policy in group.policies))
    values = [{p: v for p in group.policies if (v := group.value(p, CACHED)) is not None} for group in groups]
    if not any(values):
        return None

    def paint(axes: Any) -> None:
        for place, row in enumerate(values):
            if row:
                axes.plot([min(row.values()), max(row.values())], [place, place], color=LINE, linewidth=2, zorder=1)
            for policy, value in row.items():
                axes.plot(value, place, style(policy).marker, color=style(policy).colour, markersize=6)
        axes.set_yticks(range(len(groups)), [group.label for group in groups], fontsize=8)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.grid(axis="y", visible=False)
        axes.set_ylim(len(groups) - 0.4, -0.6)
        axes.set_xlim(left=0)
        axes.set_xlabel("cached, % of prompt tokens")
        name_marks(axes, policies)

    said = "; ".join(
        f"{group.label}: {', '.join(f'{policy_words(p)} {format_number(v)} %' for p, v in row.items())}"
        for group, row in zip(groups, values, strict=True)
    )
    return draw(
        paint,
        title="Cached tokens by cell",
        alt=said,
        height=1.2 + 0.24 * len(groups) + 0.2 * ((len(policies) + 1) // 2),
    )


def _depth(group: Group) -> Picture | None:
    import numpy as np

    found = {policy: group.values(policy, "cached_documents") for policy in group.policies}
    found = {policy: depths[np.isfinite(depths)] for policy, depths in found.items() if np.isfinite(depths).any()}
    deepest = int(max((depths.max() for depths in found.values()), default=0))
    if not deepest:
        return None
    shares = {p: [100 * float((depths >= d).mean()) for d in range(1, deepest + 1)] for p, depths in found.items()}

    def paint(axes: Any) -> None:
        ends = []
        for policy, line in shares.items():
            looks = style(policy)
            places = np.arange(1, deepest + 1)
            axes.plot(places, line, looks.dashes, marker=looks.marker, markersize=5, color=looks.colour)
            ends.append((deepest, line[-1], policy_words(policy), looks))
        axes.set_ylim(0, 100)
        axes.set_xticks(range(1, deepest + 1, max(1, deepest // 8)))
        axes.set_xlabel("at least so many documents cached")
        axes.set_ylabel("requests, %")
        label_ends(axes, ends)

    said = ", ".join(
        f"{policy_words(policy)} {format_number(line[0])} % at least one" for policy, line in shares.items()
    )
    return draw(
        paint,
        title=titled("Hit depth", group.label),
        alt=said,
        caption="Whole documents from the first one on that were in the cache. Nothing was timed.",
    )
