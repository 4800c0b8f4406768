"""Figures by which suites compare two policies: the headline and the overview of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.headline import Chart, Headline, main_policy, saving_words
from ragorder.eval.report.marks import Mark
from ragorder.eval.report.metrics import CACHED, TTFT_P50, Metric
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, change_words, format_number, policy_words, signed

__all__ = ["Compared", "compare_groups", "headline_of", "overview_of"]

_FEW_CELLS, _FEW_SUITES = 24, 3
_VERDICTS = ("better", "no difference", "not decided", "worse", "too few requests")


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of one policy against another's, both in words, in the cells of a suite, each by its label; `drawn_as`
    is the policy whose colour and marker it has."""

    metric: Metric
    policy: str
    baseline: str
    cells: Sequence[tuple[str, PairedDifference]]
    drawn_as: str = "auto"

    @property
    def differences(self) -> list[PairedDifference]:
        return [found for _, found in self.cells]

    @property
    def scale(self) -> int:
        return 100 if self.metric.relative else 1

    @property
    def unit(self) -> str:
        return f"{THIN}%" if self.metric.relative else f" {self.metric.change_unit}"

    @property
    def better(self) -> bool:
        """In every cell."""
        return all(found.verdict == "better" for found in self.differences)


def compare_groups(groups: Sequence[RecordGroup[Any]], baseline: str) -> list[Compared]:
    """Cached tokens and, where there is a clock, times, of the policy that matters most."""
    policy = main_policy(list(dict.fromkeys(policy for group in groups for policy in group.policies)), baseline)
    if policy is None:
        return []
    made = []
    for metric in (CACHED, TTFT_P50):
        cells = [
            (group.label, found) for group in groups if (found := group.compare(policy, baseline, metric)) is not None
        ]
        made += [Compared(metric, policy_words(policy), policy_words(baseline), cells, policy)] if cells else []
    return made


def headline_of(suites: Sequence[tuple[str, Sequence[Compared]]]) -> Headline:
    """By the titles of suites, each with its most important figure first."""
    headline = Headline()
    metrics = dict.fromkeys(compared[0].metric for _, compared in suites if compared)
    for metric in metrics:
        chosen = [(title, compared) for title, compared in suites if compared and compared[0].metric == metric]
        if len(chosen) > _FEW_SUITES:
            better = sum(compared[0].better for _, compared in chosen)
            said = "ordering finds more tokens in the cache" if metric == CACHED else f"{metric.name}: better"
            headline.words.append(f"In {better} of {len(chosen)} suites {said} in every cell; see the table.")
        else:
            headline.words.extend(_words(title, compared) for title, compared in chosen)
        headline.charts.append(_chart(metric, [(title, compared[0]) for title, compared in chosen]))
    return headline


def _words(title: str, compared: Sequence[Compared]) -> str:
    main, times = compared[0], next((each for each in compared[1:] if each.metric == TTFT_P50), None)
    if main.metric == CACHED and len(main.cells) == 1:
        timed = times.differences[0] if times else None
        return saving_words(main.policy, main.baseline, main.differences[0], timed, where=title)
    changes = sorted(main.scale * found.difference for found in main.differences)
    name = f"the {main.metric.words or main.metric.name}"
    if len(changes) == 1:
        (found,) = main.differences
        decided = "" if found.known and found.verdict != "no difference" else " (not decided)"
        unit = "" if main.metric.relative else main.unit
        return f"{title}: {main.policy} changes {name} by {change_words(found)}{unit}{decided} against {main.baseline}."
    verdicts = [each.verdict if each.verdict != "no difference" else "not decided" for each in main.differences]
    return (
        f"{title}: {main.policy} changes {name} by {signed(changes[0])} to {signed(changes[-1])}{main.unit} against "
        f"{main.baseline}; of {len(changes)} cells {_counted(verdicts)}."
    )


def _chart(metric: Metric, suites: Sequence[tuple[str, Compared]]) -> Chart:
    marks: list[Mark] = []
    for title, compared in suites:
        if len(compared.cells) == 1 or (len(suites) == 1 and len(compared.cells) <= _FEW_CELLS):
            named = [(label if len(compared.cells) > 1 else title, found) for label, found in compared.cells]
            marks += [Mark.of(label or title, compared.drawn_as, found) for label, found in named]
        else:
            changes = [compared.scale * found.difference for found in compared.differences]
            marks.append(Mark(title, median(changes), min(changes), max(changes), policy=compared.drawn_as))
    caption = "95 % intervals; of a suite with several cells, from the smallest change to the largest."
    axis = "per cent" if metric.relative else "percentage points"
    title = f"{metric.name[0].upper()}{metric.name[1:]}, against the baseline"
    return Chart(title, axis, marks, caption, lower_is_better=metric.better == "lower")


def overview_of(suites: Sequence[tuple[Entry, Sequence[Compared]]]) -> Table | None:
    """A row for each figure; None without any."""
    table = Table("At a glance", ["suite", "compared", "figure", "change", "verdicts"])
    for suite, compared in suites:
        for each in compared:
            changes = [each.scale * found.difference for found in each.differences]
            low, high = (format_number(end) for end in (min(changes), max(changes)))
            verdicts = [found.verdict if found.known else "too few requests" for found in each.differences]
            row = [suite, Entry(each.policy, f"against {each.baseline}"), Entry(each.metric.name)]
            change = low if len(changes) == 1 else f"{low} to {high}"
            table.rows.append([*row, Entry(f"{change}{each.unit}"), Entry(_counted(verdicts))])
    table.note = "Over all cells of a suite, from the smallest change to the largest."
    return table if table.rows else None


def _counted(verdicts: Sequence[str]) -> str:
    return ", ".join(f"{count} {each}" for each in _VERDICTS if (count := verdicts.count(each)))
