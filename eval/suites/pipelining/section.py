"""Sections on the JSON of `ragorder bench --pipeline --json`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ragorder.eval.report.headline import Chart, Headline, Lead
from ragorder.eval.report.marks import Mark
from ragorder.eval.report.sections import Section
from ragorder.eval.report.statistics import StatisticsError, compare_seeds
from ragorder.eval.report.words import change_words
from ragorder.eval.running.cells import complaint
from ragorder.eval.running.reading import ResultsError
from ragorder.eval.running.suite import Suite
from ragorder.eval.suites.pipelining.bench import PipelineResult
from ragorder.eval.suites.pipelining.tables import pipelines_table

__all__ = ["is_pipelines", "pipelines_section"]


def is_pipelines(value: Any) -> bool:
    runs = value.get("runs") if isinstance(value, dict) else None
    return isinstance(runs, list) and bool(runs) and all(isinstance(run, dict) and "pipeline" in run for run in runs)


def pipelines_section(path: Path, value: Mapping[str, Any]) -> Section:
    """Raises ResultsError naming the file and the field."""
    try:
        results = TypeAdapter(list[PipelineResult]).validate_python(value["runs"])
    except ValidationError as error:
        raise ResultsError(f"{path}: runs.{complaint(error)}: give the JSON of 'ragorder bench --json'") from None
    suite = Suite.unlisted(f"bench-{path.stem}", f"Pipelines {path.name}")
    section = Section(suite, "", [], "", "", environment=value.get("environment") or {})
    marks, words = [], []
    for workload, group in groupby(results, key=lambda result: result.workload):
        runs = list(group)
        section.tables.append(pipelines_table(runs))
        times: dict[tuple[str, str], dict[int, float]] = {}
        for run in runs:
            if run.ttft_ms is not None:
                times.setdefault((run.policy, run.pipeline), {})[run.seed] = run.ttft_ms["p50"]
        for (policy, pipeline), ours in times.items():
            plain = times.get((policy, "none"), {})
            seeds = sorted(plain.keys() & ours.keys()) if pipeline != "none" else []
            try:
                sides = [[side[seed] for seed in seeds] for side in (plain, ours)]
                found = compare_seeds(sides[0], sides[1], relative=True, better="lower")
            except StatisticsError:
                continue
            marks.append(Mark.of(f"{policy}, {pipeline}", policy, found))
            decided = "" if found.verdict != "no difference" else " (not decided)"
            subject = f"{workload}: {pipeline} changes {policy}'s median time to the first token"
            words.append(f"{subject} by {change_words(found)}{decided}.")
    caption = "95 % intervals over the seeds."
    chart = Chart("Median TTFT, against no pipeline", "per cent", marks, caption, lower_is_better=True)
    section.headline = Headline(words or ["Not decided: there is no run without a pipeline."], [chart] if marks else [])
    if marks:
        compared = f": the smallest and the largest change of {len(marks)} runs" if len(marks) > 1 else ""
        says = f"Median time to the first token, against no pipeline{compared}."
        section.headline.lead = Lead([mark.value for mark in marks], "per cent", says)
    return section
