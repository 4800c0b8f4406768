"""Picture of a replay's report."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ragorder.eval.replay.report import CapacityInfo, ReplayReport
from ragorder.eval.report.canvas import need_matplotlib
from ragorder.eval.report.words import policy_words, short_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which the colour-blind can tell apart; the markers differ as well.
_COLOURS = {
    "retrieval": "#555555",
    "greedy": "#E69F00",
    "prefix": "#009E73",
    "frequency": "#CC79A7",
    "popularity": "#56B4E9",
    "earned": "#0072B2",
    "free": "#D55E00",
}
_MARKERS = {
    "retrieval": "s",
    "greedy": "^",
    "prefix": "D",
    "frequency": "v",
    "popularity": "P",
    "earned": "o",
    "free": "X",
}
_WIDTH, _HEIGHT, _DPI = 12.0, 6.0, 100


def plot_report(report: ReplayReport, file: str | Path | IO[bytes]) -> None:
    """Write the picture as PNG. Raises ImportError, OSError."""
    draw_report(report).savefig(file, format="png")


def draw_report(report: ReplayReport) -> Figure:
    """A figure of 1,200 x 600 pixels: cached ratio by capacity, and along the log at one. Raises ImportError."""
    need_matplotlib("a plot")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _HEIGHT), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    by_capacity, along = figure.subplots(1, 2, width_ratios=(3, 2), sharey=True)
    title = f"{report.log.name[-60:]}: what a prefix cache would reuse of {report.log.requests:,} requests"
    figure.suptitle(title, fontsize=14, parse_math=False)
    _by_capacity(report, by_capacity)
    _along(report, along)
    handles, labels = by_capacity.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 5),
        fontsize=9.5,
        columnspacing=1.0,
        handlelength=2.2,
        frameon=False,
    )
    return figure


def _by_capacity(report: ReplayReport, axes: Any) -> None:
    places = range(len(report.capacities))
    for policy in report.policies:
        ratios = [100 * report.at(policy, capacity).cached_ratio for capacity in report.capacities]
        axes.plot(places, ratios, label=policy_words(policy), **_style(policy))
    overlap = report.overlap
    about = "" if overlap.exact else "about "
    bound, one_prompt = 100 * overlap.bound_ratio, 100 * overlap.one_prompt_ratio
    axes.axhline(bound, color="black", linestyle="--", linewidth=1.2, label=f"bound: seen before ({bound:.1f} %)")
    label = f"bound: in one earlier prompt ({about}{one_prompt:.1f} %)"
    axes.axhline(one_prompt, color="black", linestyle=":", linewidth=1.6, label=label)
    axes.set_xticks(places, [_size(report, capacity) for capacity in report.capacities])
    axes.set_xlabel("cache: tokens, and as a share of all distinct documents")
    axes.set_ylabel("cached tokens, % of prompt tokens")
    axes.set_title("By cache size")
    _frame(axes, report)


def _along(report: ReplayReport, axes: Any) -> None:
    capacity = report.focus
    for policy in report.policies:
        tenths = report.at(policy, capacity).tenths
        axes.plot(
            range(1, len(tenths) + 1), [100 * ratio for ratio in tenths], label=policy_words(policy), **_style(policy)
        )
    axes.set_xticks(range(1, 11))
    axes.set_xlabel("tenth of the log")
    axes.set_title(f"Along the log, cache {capacity.name}")
    _frame(axes, report)


def _frame(axes: Any, report: ReplayReport) -> None:
    axes.set_ylim(0, min(105, 100 * report.overlap.bound_ratio * 1.15 + 5))
    axes.grid(axis="y", color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)


def _style(policy: str) -> dict[str, Any]:
    return {"color": _COLOURS[policy], "marker": _MARKERS[policy], "linewidth": 2, "markersize": 7}


def _size(report: ReplayReport, capacity: CapacityInfo) -> str:
    tokens = capacity.tokens
    if tokens is None:
        return "unlimited"
    return f"{short_number(tokens)}\n{100 * tokens / max(1, report.log.working_set_tokens):.3g} %"
