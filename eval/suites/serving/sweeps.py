"""Line pictures of swept parameters: values, and differences to the baseline with their intervals."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ragorder.eval.report.canvas import INK, Picture, Style, draw, label_ends, name_marks, style, titled
from ragorder.eval.report.groups import Group
from ragorder.eval.report.metrics import CACHED, PLACES, SHARE_MOVED, TTFT_P50, Metric
from ragorder.eval.report.words import axis_words, cell_words, format_number, policy_words, signed, value_on_axis
from ragorder.eval.running.suite import Suite

# Parameters without an order, and so without a line between their values.
_UNORDERED = ("guards", "residency", "order", "corpus", "batch", "policy")
_APART = 0.09

_Point = tuple[int, float, float, float]
"""Place, value, and the ends of its interval."""


def sweep_pictures(suite: Suite, groups: Sequence[Group], baseline: str) -> list[Picture]:
    """Values, and differences to the baseline, for each metric and each combination of the other parameters."""
    x = _swept(suite, groups)
    if x is None:
        return []
    found: list[Picture | None] = []
    for others, panel in panels_of(groups, x):
        for metric in [CACHED] + [TTFT_P50] * any(group.has(TTFT_P50.column) for group in panel):
            found += [_values(panel, x, metric, others), _changes(panel, x, metric, others, baseline)]
    return [picture for picture in found if picture is not None]


def _swept(suite: Suite, groups: Sequence[Group]) -> str | None:
    values = {name: {repr(g.cell.get(name)): g.cell.get(name) for g in groups} for name in groups[0].varies}
    values = {name: found for name, found in values.items() if len(found) >= 2}
    if suite.report.x is not None:
        return suite.report.x if suite.report.x in values else None
    sizes = [name for name, found in values.items() if len(found) >= 3 and all(map(_is_size, found.values()))]
    return max(sizes, key=lambda name: len(values[name]), default=None)


def _is_size(value: Any) -> bool:
    return value is None or _number(value) or (isinstance(value, str) and value.removesuffix("%").isdigit())


def panels_of(groups: Sequence[Group], x: str) -> list[tuple[str, list[Group]]]:
    """Groups that differ only in `x`, with the words for their other parameters."""
    panels: dict[str, list[Group]] = {}
    for group in groups:
        others = {name: value for name, value in group.varies.items() if name != x}
        panels.setdefault(cell_words(others), []).append(group)
    return [(others, _sorted(panel, x)) for others, panel in panels.items() if len(panel) >= 2]


def _sorted(panel: list[Group], x: str) -> list[Group]:
    if all(_number(group.cell.get(x)) or group.cell.get(x) is None for group in panel):
        return sorted(panel, key=lambda group: (group.cell.get(x) is None, group.cell.get(x) or 0))
    return panel


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ticks(panel: Sequence[Group], x: str) -> list[str]:
    return [value_on_axis(x, group.cell.get(x)) for group in panel]


def _values(panel: Sequence[Group], x: str, metric: Metric, others: str) -> Picture | None:
    lines: dict[str, list[_Point]] = {}
    for place, group in enumerate(panel):
        for policy in group.policies:
            value, seeds = group.value(policy, metric), group.by_seed(policy, metric)
            if value is not None and seeds:
                lines.setdefault(policy, []).append((place, value, min(seeds), max(seeds)))
    if not lines:
        return None
    return _draw(
        panel,
        x,
        {policy: [(place, value, low, high) for place, value, low, high in line] for policy, line in lines.items()},
        title=_title(metric.name.capitalize() if metric is CACHED else metric.name, x, others),
        unit=metric.heading,
        caption=f"{_extent(x)}: from the lowest seed to the highest.",
        floor=True,
    )


def _changes(panel: Sequence[Group], x: str, metric: Metric, others: str, baseline: str) -> Picture | None:
    scale = 100 if metric.relative else 1
    lines: dict[str, list[_Point]] = {}
    for place, group in enumerate(panel):
        for policy in group.policies:
            found = group.compare(policy, baseline, metric)
            if found is not None and found.known:
                ends = (found.difference, found.low, found.high)
                lines.setdefault(policy, []).append((place, *(scale * end for end in ends)))  # type: ignore[arg-type]
    lines.pop("none", None)
    if not lines:
        return None
    return _draw(
        panel,
        x,
        lines,
        title=_title(f"{metric.name} against {policy_words(baseline)}", x, others),
        unit=f"change, {metric.change_unit}",
        caption=f"{_extent(x)}: 95 % intervals of the paired difference. {metric.better.capitalize()} is better.",
        floor=False,
    )


def _extent(x: str) -> str:
    return "Bars" if x in _UNORDERED else "Bands"


def _title(what: str, x: str, others: str) -> str:
    words = f"{what[0].upper()}{what[1:]} by {axis_words(x).partition(',')[0]}"
    return f"{words} ({others})" if others else words


def _draw(
    panel: Sequence[Group],
    x: str,
    lines: Mapping[str, Sequence[_Point]],
    *,
    title: str,
    unit: str,
    caption: str,
    floor: bool,
) -> Picture:
    ticks = _ticks(panel, x)

    def paint(axes: Any) -> None:
        ends: list[tuple[float, float, str, Style]] = []
        for nth, (policy, line) in enumerate(lines.items()):
            looks = style(policy)
            places, values, low, high = map(list, zip(*line, strict=True))
            if x in _UNORDERED:
                places = [place + _APART * (nth - (len(lines) - 1) / 2) for place in places]
                axes.vlines(places, low, high, color=looks.colour, linewidth=1.4)
                axes.plot(places, values, looks.marker, color=looks.colour, markersize=5)
                continue
            for part in strokes(panel, x, line):
                places, values, low, high = map(list, zip(*part, strict=True))
                axes.fill_between(places, low, high, color=looks.colour, alpha=0.15, linewidth=0)
                axes.plot(places, values, looks.dashes, color=looks.colour, marker=looks.marker, markersize=5)
            ends.append((places[-1], values[-1], policy_words(policy), looks))
        if x in _UNORDERED:
            name_marks(axes, list(lines))
        if floor:
            axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))
        else:
            axes.axhline(0, color=INK, linewidth=0.9)
        crowded = sum(map(len, ticks)) > 32
        axes.set_xticks(range(len(ticks)), ticks, rotation=35 if crowded else 0, ha="right" if crowded else "center")
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(axis_words(x))
        axes.set_ylabel(unit)
        label_ends(axes, ends)

    form = format_number if floor else signed
    said = "; ".join(
        f"{policy_words(p)}: {', '.join(f'{ticks[at]} {form(v)}' for at, v, *_ in line)}" for p, line in lines.items()
    )
    return draw(paint, title=title, alt=f"{unit}; {said}", caption=caption, height=4.2 if x in _UNORDERED else 3.1)


def strokes(panel: Sequence[Group], x: str, line: Sequence[_Point]) -> Iterator[list[_Point]]:
    """A line without a stroke between two sweeps: the workloads ov0.4 and ov0.6 are of one, ov0.4-kept of another."""
    for _, part in groupby(line, lambda point: x == "workload" and re.sub(r"[\d.]", "", panel[point[0]].cell[x])):
        yield list(part)


def position_pictures(groups: Sequence[Group], x: str | None) -> list[Picture]:
    """Cached share by distance and by share of moved documents, for each combination of the other parameters."""
    panels = panels_of(groups, x) if x is not None else [("", list(groups))]
    found = (_moves(panel, x, others, metric) for others, panel in panels for metric in (PLACES, SHARE_MOVED))
    return [picture for picture in found if picture is not None]


def _moves(groups: Sequence[Group], swept: str | None, others: str, metric: Metric) -> Picture | None:
    points = [
        (x, y, policy, group.label if swept is None else value_on_axis(swept, group.cell.get(swept)))
        for group in groups
        for policy in group.policies
        if (x := group.value(policy, metric)) is not None and (y := group.value(policy, CACHED)) is not None
    ]
    if not any(x for x, *_ in points):
        return None
    policies = list(dict.fromkeys(policy for *_, policy, _ in points))
    named = "free" if "free" in policies else policies[-1]

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

    said = "; ".join(
        f"{label} {policy_words(p)}: {format_number(x, 2)}, {format_number(y)} %".strip() for x, y, p, label in points
    )
    return draw(
        paint,
        title=titled("How far documents move" if metric is PLACES else "How many documents move", others),
        alt=said,
        caption=f"What a move buys: higher is more cached, further left is less moved. Named: {policy_words(named)}.",
        height=3.8,
    )
