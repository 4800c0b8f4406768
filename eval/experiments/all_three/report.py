"""Tables of all three systems together."""

from __future__ import annotations

from statistics import fmean

from ragorder.eval.experiments.all_three.record import AllThreeRecord
from ragorder.eval.experiments.all_three.systems import SYSTEMS
from ragorder.eval.report.groups import RecordGroup, group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_WORDS = (
    "The model was trained for this task, on the spot: it resolves a reference to a document in front of the one that "
    "refers, so it errs wherever the ranking, or the cache, puts them the other way round. What other models do is not "
    "known.",
)


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(AllThreeRecord, suite.name))
    return Part([_table(group) for group in groups], words=_WORDS if groups else ())


def _table(group: RecordGroup[AllThreeRecord]) -> Table:
    headings = ["", "mean, s", "right, %", "computed, % of prompt", "steps", "streamed, MB", "tokens/streamed MB"]
    table = Table("All three together, each switched off in turn", headings)
    for policy in SYSTEMS:
        runs = group.runs(policy)
        if not runs:
            continue
        prompt, computed, steps, streamed = (
            fmean(float(run.facts[name]) for run in runs)
            for name in ("prompt_tokens", "computed_tokens", "steps", "streamed_bytes")
        )
        table.add(
            policy,
            format_number(fmean(fmean(run.rows["latency_s"]) for run in runs), 3),
            format_number(100 * fmean(fmean(run.rows["right"]) for run in runs), 1),
            format_number(100 * computed / prompt, 1),
            format_number(steps, 0),
            format_number(streamed / 1e6, 0),
            format_number(1e6 * prompt / streamed if streamed else None, 0),
        )
    table.note = "Computed: tokens of prompts, answers and speculations. Means over all seeds' runs."
    return table
