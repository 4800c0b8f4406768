"""Tables and pictures of right answers by place."""

from __future__ import annotations

from typing import Any

from ragorder.benchmarks.fusion.fusion.report import TOY
from ragorder.benchmarks.fusion.quality_positions.record import PositionsRecord
from ragorder.benchmarks.fusion.quality_positions.results import (
    Group,
    Share,
    bands,
    by_place,
    change,
    definition_in_front,
    mean,
    swapped,
    total,
)
from ragorder.eval.report.canvas import Picture, draw, name_marks, style, titled
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import change_words, format_number, policy_words
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_TASKS = {
    "look-up": "a look-up of one document",
    "definition first": "chains of two documents, ranked with the definition in front of the link",
    "link first": "chains of two documents, ranked with the link in front of the definition",
}
_PICTURED = ("retrieval", "prefix", "free", "random")
_FEW = 10
"""Fewer questions are no point of a picture."""

_ALL = (
    "%: exact match, with Wilson's 95 % interval. Change: points to retrieval order, paired by question, with the "
    "bootstrap's 95 % interval. Lost, won: questions that retrieval order alone answers, and this order alone, with "
    "McNemar's exact test. Place: of the document that the question names, from the front. Moved: places a document, "
    "on average. Cached: of the prompts' tokens, on a simulated engine, as though each document had 200."
)
_EACH = (
    "%: exact match by the place of the document that the question names, from the front, with Wilson's 95 % interval "
    "and the number of questions. Questions differ from place to place: retrieval puts the popular ones in front."
)
_CHAINS = "The model has learnt to follow links to what stands in front of them: this is the toy's own, and total."


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(PositionsRecord, suite.name))
    tables = [table for group in groups for table in _tables(group, suite.baseline)]
    return Part(tables, words=[TOY] if groups else [], pictures=lambda: [*map(_picture, groups)])


def _tables(group: Group, baseline: str) -> list[Table]:
    tables = [_compared(group, baseline), _placed(group)]
    if all("other_place" in run.rows for run in group.runs()):
        tables.append(_chained(group))
    return tables


def _setting(group: Group) -> str:
    cell = group.runs()[0].setting
    return f"{_TASKS[cell.task]}, of {cell.documents}"


def _compared(group: Group, baseline: str) -> Table:
    headings = ["order of documents", "right, %", "change", "lost, won", "place", "moved", "cached, %"]
    table = Table(f"Right answers: {_setting(group)}", headings)
    for policy in group.policies:
        table.add(
            policy_words(policy),
            _percent(total(group, policy)),
            *(_against(group, policy, baseline) if policy != baseline else (Entry("–"), Entry("–"))),
            format_number(1 + mean(group, policy, "place")),
            format_number(mean(group, policy, "displacement"), 2),
            format_number(100 * mean(group, policy, "cached_tokens", of="prompt_tokens")),
        )
    first = group.runs()[0]
    seeds = ", ".join(map(str, group.seeds))
    table.note = f"{first.requests:,} questions × seeds {seeds}, a model and a stream for each seed. {_ALL}"
    return table


def _against(group: Group, policy: str, baseline: str) -> tuple[Entry, Entry]:
    found = change(group, policy, baseline)
    if found is None:
        return Entry("–"), Entry("–")
    difference, _, interval = change_words(found).partition(" ")
    lost, won, p = swapped(group, policy, baseline)
    chance = f"p {p:.2g}" if p >= 0.001 else "p < 0.001"
    return Entry(difference, interval, found.verdict), Entry(f"{lost:,}, {won:,}", chance if lost + won else "")


def _placed(group: Group) -> Table:
    table = Table(f"By place: {_setting(group)}", ["order of documents", *map(_band, bands(group))])
    for policy in group.policies:
        shares = by_place(group, policy)
        table.add(policy_words(policy), *(_percent(share, counted=True) for share in shares))
    table.note = _EACH
    return table


def _chained(group: Group) -> Table:
    headings = ["order of documents", "definition in front, %", "right, %", "definition behind, %", "right, %"]
    table = Table(f"By what stands in front: {_setting(group)}", headings)
    for policy in group.policies:
        sides = [definition_in_front(group, policy, behind=behind) for behind in (False, True)]
        count = sum(side.count for side in sides)
        entries = ((Entry(format_number(100 * side.count / count)), _percent(side, counted=True)) for side in sides)
        table.add(policy_words(policy), *(each for pair in entries for each in pair))
    table.note = _CHAINS
    return table


def _percent(share: Share, *, counted: bool = False) -> Entry:
    if share.share is None or share.interval is None:
        return Entry("–")
    low, high = (format_number(100 * end) for end in share.interval)
    return Entry(format_number(100 * share.share), f"[{low}, {high}]" + f" of {share.count:,}" * counted)


def _band(places: range) -> str:
    return str(places.start + 1) if len(places) == 1 else f"{places.start + 1} to {places.stop}"


def _picture(group: Group) -> Picture:
    policies = [policy for policy in _PICTURED if policy in group.policies]
    points = {
        policy: [(number, share) for number, share in enumerate(by_place(group, policy)) if share.count >= _FEW]
        for policy in policies
    }

    def paint(axes: Any) -> None:
        for policy, found in points.items():
            looks = style(policy)
            places = [number for number, _ in found]
            shares = [share.share or 0.0 for _, share in found]
            ends = [share.interval or (0.0, 1.0) for _, share in found]
            reach = [
                [max(0.0, share - low) for share, (low, _) in zip(shares, ends, strict=True)],
                [max(0.0, high - share) for share, (_, high) in zip(shares, ends, strict=True)],
            ]
            axes.errorbar(
                places,
                shares,
                yerr=reach,
                fmt=looks.dashes,
                marker=looks.marker,
                markersize=4,
                color=looks.colour,
                elinewidth=0.8,
            )
        axes.set_xticks(range(len(bands(group))), [_band(band) for band in bands(group)], fontsize=8)
        axes.set_ylim(-0.03, 1.05)
        axes.set_xlabel("place of the document that the question names")
        axes.set_ylabel("exact match")
        name_marks(axes, policies, lines=True)

    alt = "; ".join(
        f"{policy_words(policy)}: {', '.join(format_number(share.share, 2) for _, share in found)}"
        for policy, found in points.items()
    )
    return draw(
        paint, title=titled("Right answers by place", _setting(group)), alt=alt, caption="With Wilson's intervals."
    )
