"""Comparison tables of `ragorder bench --pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console

from ragorder.eval.report.statistics import known_mean
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.suites.pipelining.bench import PipelineResult

__all__ = ["pipelines_table", "print_pipelines"]


def print_pipelines(results: Sequence[PipelineResult], *, stderr: bool = False) -> None:
    console = Console(stderr=stderr)
    for _, group in groupby(results, key=lambda result: result.workload):
        console.print(pipelines_table(list(group)))


def pipelines_table(results: Sequence[PipelineResult]) -> Table:
    """One workload, each row the mean of the seeds. Ratio: the p50 to that without a pipeline; exposed: retrieval that
    overlaps with nothing; right: of all speculations; wasted: prompt tokens of the wrong ones."""
    first = results[0]
    seeds = ", ".join(map(str, sorted({result.seed for result in results})))
    failed = any(result.failures for result in results)
    answered = any(result.tbt_ms is not None for result in results)
    speculated = any(result.pipeline == "speculative" for result in results)
    headings = ["policy", "TTFT ms\np50, p95", "p50\nratio", "exposed\nms", "cached"]
    table = Table(
        f"{first.workload}: {first.requests:,} requests, retrieval takes {first.retrieval_delay_ms:g} ms",
        [*headings, *["TBT ms\np50, p99"] * answered, *["right", "wasted\ntokens"] * speculated, *["failed"] * failed],
        note=f"TTFT counts from the question; {first.concurrency} in flight, seeds {seeds}",
    )
    rows: dict[tuple[str, str], list[PipelineResult]] = {}
    for result in results:
        rows.setdefault((result.policy, result.pipeline), []).append(result)
    for (policy, pipeline), runs in rows.items():
        plain, p50, p95 = _time(rows[policy, "none"], "p50"), _time(runs, "p50"), _time(runs, "p95")
        exposed = known_mean(run.exposed_ms for run in runs)
        cells: list[str | Entry] = [
            "–" if p50 is None or p95 is None else f"{p50:.0f}, {p95:.0f}",
            f"{p50 / plain:.2f}" if p50 and plain else "–",
            "–" if exposed is None else f"{exposed:.0f}",
            f"{100 * _sum(runs, 'cached_tokens') / max(1, _sum(runs, 'prompt_tokens')):.1f} %",
        ]
        if answered:
            between = [known_mean(run.tbt_ms[share] for run in runs if run.tbt_ms) for share in ("p50", "p99")]
            cells += [", ".join(map(format_number, between))]
        if speculated:
            cells += [f"{_sum(runs, 'right'):,}/{_sum(runs, 'speculations'):,}"]
            cells += [f"{_sum(runs, 'wasted_prompt_tokens'):,}"]
        if failed:
            failures = _sum(runs, "failures")
            cells += [Entry(f"{failures:,}", tone="bad" if failures else "")]
        table.add(policy if pipeline == "none" else f"+ {pipeline}", *cells)
    return table


def _sum(results: Sequence[PipelineResult], name: str) -> int:
    return sum(getattr(result, name) for result in results)


def _time(results: Sequence[PipelineResult], name: str) -> float | None:
    return known_mean(None if result.ttft_ms is None else result.ttft_ms[name] for result in results)
