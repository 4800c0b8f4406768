"""Figures by which suites compare two policies: the headline and the overview of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragorder.eval.report.groups import RecordGroup
from ragorder.eval.report.headline import Chart, Headline, Lead, main_policy, saving_words
from ragorder.eval.report.marks import Mark
from ragorder.eval.report.metrics import CACHED, TTFT_P50, Metric
from ragorder.eval.report.statistics import PairedDifference
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import THIN, capital, change_words, policy_words, spread_words

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
    drawn_as: str = "earned"

    @property
    def differences(self) -> list[PairedDifference]:
        return [found for _, found in self.cells]

    @property
    def changes(self) -> list[float]:
        """As the report writes them: in percentage points, or in per cent of the baseline."""
        return [(100 if self.metric.relative else 1) * found.difference for found in self.differences]

    @property
    def unit(self) -> str:
        return f"{THIN}%" if self.metric.relative else f" {self.metric.change_unit}"


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
        if len(chosen) > 1:
            headline.words.append(_over_all([compared[0] for _, compared in chosen]))
        if len(chosen) <= _FEW_SUITES:
            headline.words.extend(_words(title, compared) for title, compared in chosen)
        headline.lead = headline.lead or _lead([compared[0] for _, compared in chosen])
        headline.charts.append(_chart(metric, [(title, compared[0]) for title, compared in chosen]))
    return headline


def _lead(compared: Sequence[Compared]) -> Lead:
    first, changes = compared[0], [change for each in compared for change in each.changes]
    _, against = _sides(compared)
    says = f"{capital(first.metric.words or first.metric.name)}, against {against}"
    if len(changes) > 1:
        says += (
            f": the smallest and the largest change of {len(changes)} cells. A cell is one setting of what was varied, "
            "such as a trace, a cache size or a load"
        )
    return Lead(changes, "per cent" if first.metric.relative else "percentage points", f"{says}.")


def _over_all(compared: Sequence[Compared]) -> str:
    """The sentence of `_lead`."""
    (policy, against), lead = _sides(compared), _lead(compared)
    first, verdicts = compared[0], [found.verdict for each in compared for found in each.differences]
    name = first.metric.words or first.metric.name
    return (
        f"{capital(policy)} changes the {name} by {lead.figure}{first.unit} against {against}; of {len(verdicts)} "
        f"cells in {len(compared)} suites {_decided(verdicts)}."
    )


def _sides(compared: Sequence[Compared]) -> tuple[str, str]:
    """Policy and baseline in words, if all have the same."""
    policies, baselines = {each.policy for each in compared}, {each.baseline for each in compared}
    return (
        policies.pop() if len(policies) == 1 else "ordering",
        baselines.pop() if len(baselines) == 1 else "the baseline of each suite",
    )


def _words(title: str, compared: Sequence[Compared]) -> str:
    main, times = compared[0], next((each for each in compared[1:] if each.metric == TTFT_P50), None)
    if main.metric == CACHED and len(main.cells) == 1:
        timed = times.differences[0] if times else None
        return saving_words(main.policy, main.baseline, main.differences[0], timed, where=title)
    name = f"the {main.metric.words or main.metric.name}"
    if len(main.cells) == 1:
        (found,) = main.differences
        decided = "" if found.known and found.verdict != "no difference" else " (not decided)"
        unit = "" if main.metric.relative else main.unit
        return f"{title}: {main.policy} changes {name} by {change_words(found)}{unit}{decided} against {main.baseline}."
    return (
        f"{title}: {main.policy} changes {name} by {_lead([main]).figure}{main.unit} against {main.baseline}; of "
        f"{len(main.cells)} cells {_decided([found.verdict for found in main.differences])}."
    )


def _decided(verdicts: Sequence[str]) -> str:
    return _counted([each if each != "no difference" else "not decided" for each in verdicts])


def _chart(metric: Metric, suites: Sequence[tuple[str, Compared]]) -> Chart:
    marks: list[Mark] = []
    for title, compared in suites:
        if len(compared.cells) == 1 or (len(suites) == 1 and len(compared.cells) <= _FEW_CELLS):
            named = [(label if len(compared.cells) > 1 else title, found) for label, found in compared.cells]
            marks += [Mark.of(label or title, compared.drawn_as, found) for label, found in named]
        else:
            changes = compared.changes
            marks.append(Mark(title, median(changes), min(changes), max(changes), policy=compared.drawn_as))
    caption = "95 % intervals; of a suite with several cells the median change, from the smallest to the largest."
    axis = "per cent" if metric.relative else "percentage points"
    title = f"{metric.name[0].upper()}{metric.name[1:]}, against the baseline"
    return Chart(title, axis, marks, caption, lower_is_better=metric.better == "lower")


def overview_of(suites: Sequence[tuple[Entry, Sequence[Compared]]]) -> Table | None:
    """A row for each figure; None without any."""
    table = Table("At a glance", ["suite", "compared", "figure", "change", "verdicts"])
    for suite, compared in suites:
        for each in compared:
            verdicts = [found.verdict if found.known else "too few requests" for found in each.differences]
            row = [suite, Entry(f"{each.policy} against {each.baseline}"), Entry(each.metric.name)]
            table.rows.append([*row, Entry(f"{spread_words(each.changes)}{each.unit}"), Entry(_counted(verdicts))])
    table.note = "Over all cells of a suite, from the smallest change to the largest."
    return table if table.rows else None


def _counted(verdicts: Sequence[str]) -> str:
    return ", ".join(f"{count} {each}" for each in _VERDICTS if (count := verdicts.count(each)))
