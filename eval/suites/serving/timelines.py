"""Pictures along a run: nodes in the cache, cached shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragorder.eval.report.canvas import Picture, draw, label_ends, style, titled
from ragorder.eval.report.groups import Group
from ragorder.eval.report.words import format_number, policy_words

__all__ = ["along", "timelines"]

# What runs record, read off when a request was sent.
_RECORDED = {
    "held_tokens": ("Held in the cache", "tokens that a later prompt would find"),
    "evicted_tokens": ("Evicted so far", "tokens"),
    "tree_nodes": ("The knowledge tree", "nodes"),
}


Lines = Mapping[str, tuple[str, Group, str]]
"""By name: the policy that gives a line its looks, its group, and its own policy."""


def timelines(label: str, lines: Lines) -> list[Picture]:
    found = (_recorded(label, lines, name, title, unit) for name, (title, unit) in _RECORDED.items())
    return [picture for picture in found if picture is not None]


def _recorded(label: str, wanted: Lines, name: str, title: str, unit: str) -> Picture | None:
    lines = {
        each: found for each, (_, group, policy) in wanted.items() if (found := _line(group, policy, name)) is not None
    }
    if not any(max(values) for _, values in lines.values()):
        return None
    sizes = {group.engine.get("capacity_tokens") for _, group, _ in wanted.values()}
    size = sizes.pop() if name == "held_tokens" and len(sizes) == 1 else None

    def paint(axes: Any) -> None:
        ends = []
        for each, (requests, values) in lines.items():
            looks = style(wanted[each][0])
            axes.plot(requests, values, looks.dashes, color=looks.colour)
            ends.append((requests[-1], values[-1], policy_words(each), looks))
        top = max(max(values) for _, values in lines.values())
        if size is not None and size < 2 * top:
            axes.axhline(size, linewidth=0.9, color=style("oracle").colour)
            ends.append((ends[-1][0], float(size), "the cache's size", style("oracle")))
            top = max(top, size)
        axes.set_ylim(0, top * 1.06)
        axes.yaxis.set_major_formatter(lambda value, _: _short(value))
        axes.set_xlabel("request")
        axes.set_ylabel(unit)
        label_ends(axes, ends)

    said = ", ".join(f"{policy_words(each)} {_short(values[-1])} at the end" for each, (_, values) in lines.items())
    return draw(paint, title=titled(title, label), alt=f"{unit}: {said}", caption="Mean of the seeds.")


def _line(group: Group, policy: str, name: str) -> tuple[Any, Any] | None:
    import numpy as np

    known = [run.timeline for run in group.runs(policy) if isinstance(run.timeline, Mapping)]
    known = [line for line in known if line.get("request") and line.get(name) and None not in line[name]]
    known = [
        line for line in known if line["request"] == known[0]["request"] and len(line[name]) == len(line["request"])
    ]
    if not known:
        return None
    return known[0]["request"], np.mean([line[name] for line in known], axis=0)


def _short(value: float) -> str:
    unit, size = next((each for each in (("M", 1e6), ("k", 1e3)) if abs(value) >= each[1]), ("", 1.0))
    return f"{value / size:.3g}{unit}"


def along(group: Group) -> Picture | None:
    import numpy as np

    lines = {policy: _tenths(group, policy) for policy in group.policies}
    lines = {policy: line for policy, line in lines.items() if line}
    if not lines or all(max(line) == 0 for line in lines.values()):
        return None

    def paint(axes: Any) -> None:
        ends = []
        for policy, line in lines.items():
            looks = style(policy)
            axes.plot(
                np.arange(1, len(line) + 1), line, looks.dashes, color=looks.colour, marker=looks.marker, markersize=4
            )
            ends.append((len(line), line[-1], policy_words(policy), looks))
        axes.set_ylim(0, max(1.0, max(max(line) for line in lines.values()) * 1.12))
        axes.set_xticks(range(1, 11))
        axes.set_xlabel("tenth of the run")
        axes.set_ylabel("cached, % of prompt tokens")
        label_ends(axes, ends)

    said = ", ".join(
        f"{policy_words(p)} from {format_number(line[0])} to {format_number(line[-1])} %" for p, line in lines.items()
    )
    return draw(paint, title=titled("Along the run", group.label), alt=said, caption="By tenth, all seeds together.")


def _tenths(group: Group, policy: str) -> list[float]:
    import numpy as np

    shares = []
    for run in group.runs(policy):
        cached, prompts = run.column("cached_tokens"), run.column("prompt_tokens")
        if cached is None or prompts is None or len(cached) < 10:
            return []
        parts = zip(np.array_split(cached, 10), np.array_split(prompts, 10), strict=True)
        shares.append([100 * np.nansum(c) / max(1.0, float(np.nansum(p))) for c, p in parts])
    return [float(value) for value in np.mean(shares, axis=0)] if shares else []
