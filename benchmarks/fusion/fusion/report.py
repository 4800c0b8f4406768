"""Tables and pictures of answers from reused KV, and of training."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from ragorder.benchmarks.fusion.fusion.arms import BASELINE, RATIOS, REUSE
from ragorder.benchmarks.fusion.fusion.copies_table import compares_copies, copies_table
from ragorder.benchmarks.fusion.fusion.engine_tables import reference_table, seconds_table
from ragorder.benchmarks.fusion.fusion.record import FusionRecord, TrainingRecord
from ragorder.benchmarks.fusion.fusion.results import ENOUGH, Curve, Group, curve, removed_deviation
from ragorder.eval.report.canvas import Picture, draw, label_ends, style, titled
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import change_words, format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

TOY = (
    "What this cannot show: the model is a toy (0.25 million parameters, lines of three tokens), trained for this task "
    "alone. It has no prose, no knowledge of the world, no attention sinks and no long documents. It shows which "
    "mechanism restores what reuse loses, and in which order the ways stand; a real model needs other ratios."
)
_SHOWN = (0.05, 0.15)
_PICTURED = {
    "random": "none",
    "CacheBlend": "greedy",
    "Cache-Craft": "sorted",
    "FusionRAG, online only": "prefix",
    "FusionRAG": "recency",
}
"""Arms of the pictures, and whose looks they have."""

_DEVIATING = {REUSE: "retrieval", "Cache-Craft": "sorted", "FusionRAG": "recency"}


def make_part(suite: Suite, results: Results) -> Part:
    every = group_runs(results.of(FusionRecord, suite.name))
    groups = [group for group in every if not compares_copies(group)]
    copies = [group for group in every if compares_copies(group)]
    trained = group_runs(results.of(TrainingRecord, suite.name))
    tables = [table for group in groups for table in _tables(group)]
    return Part(
        [*tables, *([copies_table(copies)] if copies else []), *map(_training, trained)],
        words=[TOY] if every else [],
        pictures=lambda: [
            *map(_picture, groups),
            *(_deviation_picture(group) for group in groups if _deviations(group)),
            *map(_training_picture, trained),
        ],
    )


def _tables(group: Group) -> list[Table]:
    setting = _setting(group)
    by_engine = [make(group, setting) for make in (seconds_table, reference_table)]
    return [_curves(group), _compared(group), *(table for table in by_engine if table is not None)]


def _setting(group: Group) -> str:
    cell = group.runs()[0].setting
    order = {"in front": "definitions in front", "behind": "definitions behind", "any": "documents in any order"}
    engine = ", embedded engine" if cell.by == "engine" else ""
    return f"{cell.hops} hops, {cell.documents} documents, {order[cell.order]}{engine}"


def _curves(group: Group) -> Table:
    table = Table(f"EM by share recomputed: {_setting(group)}", ["", *(_percent(ratio) for ratio in RATIOS)])
    for arm in group.policies:
        found = _known(group, arm)
        table.add(arm, *(format_number(found.at(ratio), 3) for ratio in RATIOS))
    first = group.runs()[0]
    facts = first.facts
    removed = removed_deviation(group, REUSE, "FusionRAG")
    note = (
        f"{first.requests:,} questions × seeds {', '.join(map(str, group.seeds))}, a model for each seed. Documents of "
        f"{facts['tokens']} tokens in all; 2 % of them are {format_number(0.02 * facts['tokens'])} tokens, a question "
        f"needs lines of {facts['answer_tokens']}."
    )
    if removed is not None:
        note += f" Preprocessing removes {format_number(100 * removed)} % of the second layer's KV deviation."
    table.note = note
    return table


def _compared(group: Group) -> Table:
    headings = [""]
    for ratio in _SHOWN:
        headings += [f"at {_percent(ratio)}, normalised", "less full attention", "less CacheBlend"]
    table = Table(f"Against full attention: {_setting(group)}", [*headings, "enough", "tokens computed"])
    for arm in group.policies:
        found = _known(group, arm)
        if len(found.ratios) < 2:
            continue
        row = [Entry(arm)]
        for ratio in _SHOWN:
            row += [Entry(_normalised(found, ratio)), _change(found, BASELINE, ratio)]
            row.append(_change(found, "CacheBlend", ratio) if arm != "CacheBlend" else Entry("–"))
        enough = found.enough()
        row += [Entry("–" if enough is None else _percent(enough))]
        row += [Entry("–" if enough is None else _percent(found.computed(enough)))]
        table.rows.append(row)
    table.note = (
        "Normalised as in FusionRAG's equation 11: 0 is full reuse, 100 full attention. Differences of EM × 100, "
        "paired by question, with 95 % intervals. Enough: the least share from which on "
        f"{_percent(ENOUGH)} are reached; tokens computed: of all documents', those of an exact prefix are not."
    )
    return table


def _normalised(found: Curve, ratio: float) -> str:
    share = found.normalised(ratio)
    return "–" if share is None else format_number(100 * share)


def _change(found: Curve, other: str, ratio: float) -> Entry:
    comparison = found.against(other, ratio)
    if comparison is None:
        return Entry("–")
    words = change_words(_hundredfold(comparison))
    change, _, interval = words.partition(" ")
    return Entry(change, interval)


def _hundredfold(comparison: Any) -> Any:
    from dataclasses import replace

    names = ("baseline", "value", "difference", "low", "high")
    return replace(comparison, **{name: 100 * getattr(comparison, name) for name in names})


def _known(group: Group, arm: str) -> Curve:
    found = curve(group, arm)
    assert found is not None, "of the group's own arms"
    return found


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def _picture(group: Group) -> Picture:
    curves = {arm: _known(group, arm) for arm in _PICTURED if arm in group.policies}
    levels = {arm: _known(group, arm).right[0] for arm in (BASELINE, REUSE) if arm in group.policies}

    def paint(axes: Any) -> None:
        for arm, found in curves.items():
            looks = style(_PICTURED[arm])
            places = [RATIOS.index(ratio) for ratio in found.ratios]
            axes.plot(
                places, found.right, looks.dashes, marker=looks.marker, markersize=4, color=looks.colour, label=arm
            )
        for level in levels.values():
            axes.axhline(level, color=style("retrieval").colour, linewidth=0.9, linestyle=":")
        axes.set_xticks(range(len(RATIOS)), [f"{100 * ratio:g}" for ratio in RATIOS])
        axes.set_ylim(-0.03, 1.05)
        axes.set_xlabel("recomputed, % of the reused tokens")
        axes.set_ylabel("exact match")
        # All of them end in one point.
        axes.figure.legend(loc="outside lower center", ncols=2, fontsize=8.5, frameon=False, handlelength=2.4)

    alt = "; ".join(
        f"{arm}: {', '.join(format_number(value, 2) for value in found.right)}" for arm, found in curves.items()
    )
    caption = ", ".join(f"{arm} {format_number(level, 2)}" for arm, level in levels.items())
    return draw(
        paint, title=titled("Right answers", _setting(group)), alt=alt, caption=f"Dotted: {caption}." if caption else ""
    )


def _deviation_picture(group: Group) -> Picture:
    """Figures 3b and 7b of FusionRAG."""
    means = _deviations(group)

    def paint(axes: Any) -> None:
        ends = []
        for arm, mean in means.items():
            looks = style(_DEVIATING[arm])
            axes.plot(range(1, len(mean) + 1), mean, color=looks.colour, linewidth=1)
            ends.append((len(mean), fmean(mean[-len(mean) // 4 :]), arm, looks))
        axes.set_xlabel("token of the documents")
        axes.set_ylabel("squared KV deviation, second layer")
        label_ends(axes, ends)

    alt = "; ".join(f"{arm}: {format_number(fmean(mean), 2)} on average" for arm, mean in means.items())
    return draw(paint, title=titled("Deviation of reused KV", _setting(group)), alt=alt, caption="From full attention.")


def _deviations(group: Group) -> dict[str, list[float]]:
    """By arm, of each token of the documents; the engine does not measure it."""
    runs = {arm: [run for run in group.runs(arm) if "deviation" in run.facts] for arm in _DEVIATING}
    columns = {arm: [run.facts["deviation"] for run in found] for arm, found in runs.items() if found}
    return {arm: [fmean(each) for each in zip(*found, strict=True)] for arm, found in columns.items()}


def _training(group: RecordGroup[TrainingRecord]) -> Table:
    kinds = ("one hop", "two hops", "three hops", "link", "link over a relay")
    table = Table(
        "Right predictions at the end of training, %", ["seed", *kinds, "steps", "million tokens", "CPU s", "kB"]
    )
    for line in group.runs():
        last = {name: column[-1] for name, column in line.rows.items()}
        shares = [last[kind] for kind in kinds]
        table.add(
            str(line.seed),
            *(format_number(None if share is None else 100 * share) for share in shares),
            format_number(line.facts["steps"], 0),
            format_number((last["tokens"] or 0) / 1e6),
            format_number(last["seconds"], 0),
            format_number(line.facts["bytes"] / 1e3, 0),
        )
    return table


def _training_picture(group: RecordGroup[TrainingRecord]) -> Picture:
    kind = "three hops" if group.cell.get("hops") == 3 else "two hops"
    lines = group.runs()

    def paint(axes: Any) -> None:
        ends = []
        for line, name in zip(lines, ("earned", "greedy", "prefix", "sorted", "recency"), strict=False):
            looks = style(name)
            known = [
                (seconds, share)
                for seconds, share in zip(line.rows["seconds"], line.rows[kind], strict=True)
                if seconds is not None and share is not None
            ]
            axes.plot(*zip(*known, strict=True), looks.dashes, color=looks.colour)
            ends.append((*known[-1], f"seed {line.seed}", looks))
        axes.set_xlabel("processor time, s")
        axes.set_ylabel(f"{kind}, share right")
        label_ends(axes, ends)

    alt = "; ".join(f"seed {line.seed}: {format_number(line.rows['seconds'][-1], 0)} s" for line in lines)
    return draw(paint, title="Training", alt=alt, caption="More documents and hops as soon as fewer are learnt.")
