"""The pictures of one suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ragorder.eval.report.canvas import CARD, INK, LINE, Picture, draw, label_ends, name_marks, style, titled
from ragorder.eval.report.groups import Group
from ragorder.eval.report.lines import draw_lines
from ragorder.eval.report.metrics import CACHED, TTFT_P50
from ragorder.eval.report.words import format_number, policy_words, short_number, value_on_axis
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.serving.moves import moves_picture
from ragorder.eval.suites.serving.sweeps import panels_of, position_pictures, sweep_pictures

POINTS = 250


def distributions(group: Group) -> Picture | None:
    import numpy as np

    columns = {policy: group.values(policy, "ttft_ms") for policy in group.policies}
    times = {
        policy: np.sort(found[np.isfinite(found)]) for policy, found in columns.items() if np.isfinite(found).any()
    }
    if not times:
        return None

    def paint(axes: Any) -> None:
        ends = []
        for policy, found in times.items():
            looks = style(policy)
            shares = 100 * np.arange(1, len(found) + 1) / len(found)
            kept = np.unique(np.linspace(0, len(found) - 1, 200).astype(int))
            axes.step(found[kept], shares[kept], where="post", color=looks.colour, linestyle=looks.dashes)
            ends.append((policy, float(np.quantile(found, 0.5)), looks))
        axes.set_ylim(0, 100)
        axes.set_xlim(0, max(float(np.quantile(found, 0.995)) for found in times.values()) * 1.03)
        axes.set_xlabel("TTFT, ms")
        axes.set_ylabel("requests answered by then, %")
        for _, middle, looks in ends:
            axes.plot(middle, 50, looks.marker, color=looks.colour, markersize=6, markeredgecolor=CARD)
        name_marks(axes, list(times), lines=True)

    medians = {policy: float(np.quantile(found, 0.5)) for policy, found in times.items()}
    said = ", ".join(f"{policy_words(policy)} p50 {format_number(middle)} ms" for policy, middle in medians.items())
    return draw(
        paint,
        title=titled("Time to first token", group.label),
        alt=said,
        caption="Further left is faster. The marks are the medians.",
        height=3.1 + 0.2 * ((len(times) + 1) // 2),
    )


def depth_by_time(group: Group) -> list[Picture]:
    """Figure 2: requests by hit depth and TTFT, and policies by hit rate and median TTFT."""
    import numpy as np

    rows: dict[str, tuple[Any, Any]] = {}
    for policy in group.policies:
        cached, prompts = group.values(policy, "cached_tokens"), group.values(policy, "prompt_tokens")
        times = group.values(policy, "ttft_ms")
        if len(times) and len(cached) == len(prompts) == len(times):
            rows[policy] = (100 * cached / np.maximum(1, prompts), times)
    if not rows:
        return []
    most = max(float(np.nanquantile(times, 0.995)) for _, times in rows.values()) * 1.03
    rng = np.random.default_rng(0)

    def scatter(axes: Any) -> None:
        for policy, (depths, times) in rows.items():
            looks = style(policy)
            known = np.flatnonzero(np.isfinite(depths) & np.isfinite(times))
            kept = rng.permutation(known)[:POINTS]
            axes.plot(
                depths[kept], times[kept], looks.marker, color=looks.colour, markersize=3, alpha=0.35, linestyle=""
            )
        axes.set_xlim(-2, 102)
        axes.set_ylim(0, most)
        axes.set_xlabel("cached, % of the request's prompt tokens")
        axes.set_ylabel("TTFT, ms")
        name_marks(axes, list(rows))

    everything = [np.concatenate(side) for side in zip(*rows.values(), strict=True)]
    known = np.isfinite(everything[0]) & np.isfinite(everything[1])
    spread = everything[0][known].std() > 0 and everything[1][known].std() > 0
    together = (
        f"correlation {format_number(float(np.corrcoef(everything[0][known], everything[1][known])[0, 1]), 2)}"
        if spread
        else ""
    )
    found = [
        draw(
            scatter,
            title=titled("Hit depth and TTFT, request by request", group.label),
            alt=f"each request's cached share and its time to first token; {together}",
            caption=f"Up to {POINTS} requests a policy{'; over all of them ' if together else ''}{together}.",
            height=3.1 + 0.2 * ((len(rows) + 1) // 2),
        )
    ]
    places = {p: (group.value(p, CACHED), group.value(p, TTFT_P50)) for p in rows}

    def strategies(axes: Any) -> None:
        ends = []
        for policy, (share, middle) in places.items():
            looks = style(policy)
            axes.plot(share, middle, looks.marker, color=looks.colour, markersize=8)
            ends.append((share or 0.0, middle or 0.0, policy_words(policy), looks))
        axes.margins(0.12, 0.15)
        axes.set_xlabel("cached, % of all prompt tokens")
        axes.set_ylabel("TTFT p50, ms")
        label_ends(axes, ends)

    said = ", ".join(
        f"{policy_words(p)} {format_number(s)} % and {format_number(m)} ms" for p, (s, m) in places.items()
    )
    found.append(draw(strategies, title=titled("Hit rate and TTFT, by strategy", group.label), alt=said))
    return found


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
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
        axes.set_xlabel("request")
        axes.set_ylabel(unit)
        label_ends(axes, ends)

    said = ", ".join(
        f"{policy_words(each)} {short_number(values[-1])} at the end" for each, (_, values) in lines.items()
    )
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


def along(group: Group) -> Picture | None:
    lines = {policy: _tenths(group, policy) for policy in group.policies}
    lines = {policy: line for policy, line in lines.items() if line}
    if not lines or all(max(line) == 0 for line in lines.values()):
        return None

    def adjust(axes: Any) -> None:
        axes.set_ylim(0, max(1.0, max(max(line) for line in lines.values()) * 1.12))
        axes.set_xticks(range(1, 11))

    said = ", ".join(
        f"{policy_words(p)} from {format_number(line[0])} to {format_number(line[-1])} %" for p, line in lines.items()
    )
    points = {policy: list(enumerate(line, 1)) for policy, line in lines.items()}
    shown: dict[str, Any] = {"alt": said, "caption": "By tenth, all seeds together.", "looks": {}, "adjust": adjust}
    return draw_lines(titled("Along the run", group.label), points, "tenth of the run", CACHED.heading, **shown)


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

    def adjust(axes: Any) -> None:
        axes.set_ylim(0, 100)
        axes.set_xticks(range(1, deepest + 1, max(1, deepest // 8)))

    said = ", ".join(
        f"{policy_words(policy)} {format_number(line[0])} % at least one" for policy, line in shares.items()
    )
    points = {policy: list(enumerate(line, 1)) for policy, line in shares.items()}
    caption = "Whole documents from the first one on that were in the cache. Nothing was timed."
    shown: dict[str, Any] = {"alt": said, "caption": caption, "looks": {}, "adjust": adjust}
    title = titled("Hit depth", group.label)
    return draw_lines(title, points, "at least this many documents cached", "requests, %", **shown)
