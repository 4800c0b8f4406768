"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from rich.console import Console
from rich.table import Table

from ragorder.eval.runner import RunResult

__all__ = ["print_results", "results_table"]


def print_results(results: Sequence[RunResult], *, stderr: bool = False) -> None:
    """One table a workload, the seeds' mean in each row."""
    console = Console(stderr=stderr)
    for _, group in groupby(results, key=lambda result: (result.workload, result.order)):
        console.print(results_table(list(group)))


def results_table(results: Sequence[RunResult]) -> Table:
    """Policies compared on one workload.

    Moved: mean displacement of a document, in places; foretold: requests whose cached tokens the policy predicted to
    within one block; p50 ratio: to the p50 of retrieval order, or of the first policy without it.
    """
    first = results[0]
    seeds = sorted({result.seed for result in results})
    capacity = "unlimited" if first.capacity_tokens is None else f"{first.capacity_tokens:,} tokens"
    extras = [f"{first.waiting} waiting"] * bool(first.waiting) + ["batch"] * first.batch
    served = f"{first.requests:,} requests, top {first.top_k}"
    table = Table(
        title=f"{first.workload} ({first.order} order) on {first.engine}: {served}",
        caption=", ".join([f"cache {capacity}", f"seeds {', '.join(map(str, seeds))}", *extras]),
    )
    timed = first.ttft_ms is not None
    table.add_column("policy", style="bold", no_wrap=True)
    headings = ["cached", "moved", "foretold"]
    headings += ["TTFT ms\np50, mean", "p50\nratio"] if timed else []
    for heading in [*headings, "order µs\np50, p99"]:
        table.add_column(heading, justify="right", no_wrap=True)
    by_policy: dict[str, list[RunResult]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    best = max(by_policy, key=lambda policy: _cached(by_policy[policy]))
    baseline = by_policy.get("retrieval", next(iter(by_policy.values())))
    for policy, rows in by_policy.items():
        foretold = [row.prediction_within_block for row in rows if row.prediction_within_block is not None]
        cells = [
            f"{100 * _cached(rows):.1f} %",
            f"{fmean(row.displacement_mean for row in rows):.2f}",
            f"{100 * fmean(foretold):.1f} %" if foretold else "–",
        ]
        if timed:
            cells += [f"{_ttft(rows, 'p50'):.0f}, {_ttft(rows, 'mean'):.0f}"]
            cells += [f"{_ttft(rows, 'p50') / _ttft(baseline, 'p50'):.2f}"]
        cells += [", ".join(f"{fmean(row.order_us[name] for row in rows):.0f}" for name in ("p50", "p99"))]
        table.add_row(policy, *cells, style="green" if policy == best else None)
    return table


def _cached(rows: Sequence[RunResult]) -> float:
    return fmean(row.cached_ratio for row in rows)


def _ttft(rows: Sequence[RunResult], name: str) -> float:
    return fmean(row.ttft_ms[name] for row in rows if row.ttft_ms is not None)
