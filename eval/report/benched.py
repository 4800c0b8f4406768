"""Sections on the JSON of `ragorder bench --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragorder.eval.report.console import deciles_table, legend, results_table
from ragorder.eval.report.headline import Chart, Headline, Lead, main_policy, saving_words
from ragorder.eval.report.marks import Mark
from ragorder.eval.report.sections import Section
from ragorder.eval.report.statistics import PairedDifference, StatisticsError, compare_seeds
from ragorder.eval.running.cells import complaint
from ragorder.eval.running.reading import ResultsError
from ragorder.eval.running.results import RunResult
from ragorder.eval.running.suite import Suite

__all__ = ["bench_section", "is_bench"]

_ONE_SEED = "one seed has no interval, repeat with --seeds 0,1,2,3,4"
_INTERVAL = "95 % intervals over the seeds."


def is_bench(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(runs := value.get("runs"), list)
        and "log" not in value
        and all(isinstance(run, dict) and "policy" in run and "order_us" in run for run in runs)
    )


def bench_section(path: Path, value: Mapping[str, Any]) -> Section:
    """Raises ResultsError naming the file and the field."""
    try:
        results = TypeAdapter(list[RunResult]).validate_python(value["runs"])
    except ValidationError as error:
        raise ResultsError(f"{path}: runs.{complaint(error)}: give the JSON of 'ragorder bench --json'") from None
    if not results:
        raise ResultsError(f"{path} holds no run: repeat 'ragorder bench --json'")
    suite = Suite.unlisted(f"bench-{path.stem}", f"Benchmark {path.name}", says=legend(results))
    section = Section(suite, "", [], "", "", headline=_headline(results), environment=value.get("environment") or {})
    for runs in _groups(results):
        section.tables.append(results_table(runs))
        if runs[0].load is not None:
            section.tables.append(deciles_table(runs))
    return section


def _groups(results: Sequence[RunResult]) -> Iterator[list[RunResult]]:
    for _, runs in groupby(results, key=lambda run: (run.workload, run.order)):
        yield list(runs)


def _headline(results: Sequence[RunResult]) -> Headline:
    headline, groups = Headline(), list(_groups(results))
    marks, changes = [], []
    for runs in groups:
        policies = list(dict.fromkeys(run.policy for run in runs))
        baseline = "retrieval" if "retrieval" in policies else policies[0]
        where = f"{runs[0].workload}, " if len(groups) > 1 else ""
        found = {policy: _compare(runs, policy, baseline) for policy in policies if policy not in (baseline, "none")}
        marks += [Mark.of(f"{where}{policy}", policy, cached) for policy, (cached, _) in found.items() if cached]
        policy = main_policy(policies, baseline)
        if policy is None:
            headline.words.append(f"{where}not decided: there is no policy beside {baseline} to compare.")
            continue
        cached, times = found[policy]
        if cached is not None:
            changes.append(cached.difference)
            headline.words.append(
                saving_words(policy, baseline, cached, times, where=where.rstrip(", "), unknown=_ONE_SEED)
            )
        else:
            headline.words.append(f"{where}not decided: {policy} and {baseline} have no seed in common.")
    if marks:
        headline.charts.append(Chart("Cached tokens, against retrieval order", "percentage points", marks, _INTERVAL))
    if changes:
        traces = f": the smallest and the largest change of {len(changes)} traces" if len(changes) > 1 else ""
        headline.lead = Lead(changes, "percentage points", f"Cached tokens, against retrieval order{traces}.")
    return headline


def _compare(
    runs: Sequence[RunResult], policy: str, baseline: str
) -> tuple[PairedDifference | None, PairedDifference | None]:
    sides = [{run.seed: run for run in runs if run.policy == each} for each in (baseline, policy)]
    seeds = sorted(sides[0].keys() & sides[1].keys())
    ratios = [[100 * side[seed].cached_ratio for seed in seeds] for side in sides]
    times = [[run.ttft_ms["p50"] for seed in seeds if (run := side[seed]).ttft_ms] for side in sides]
    try:
        cached = compare_seeds(ratios[0], ratios[1], better="higher")
        timed = compare_seeds(times[0], times[1], relative=True, better="lower") if times[0] and times[1] else None
    except StatisticsError:
        return None, None
    return cached, timed
