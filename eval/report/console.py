"""Tables of a benchmark's results."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from rich.console import Console

from ragorder.eval.report.statistics import known_mean
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import policy_words
from ragorder.eval.running.results import RunResult

__all__ = ["deciles_table", "legend", "print_results", "results_table"]

_COLUMNS = (
    "reordered: prompts of which a document moves, and of all prompts those although nothing was cached. best 1st: "
    "prompts that begin with the best document. saved each: tokens cached beyond retrieval order, for each reordered "
    "prompt. places moved: places between a document and its retrieval rank, on average. "
    "predicted: requests of which the policy predicted the cached tokens to within one block."
)
_POLICIES = {
    "none": "no prefix cache",
    "retrieval": "documents as retrieval ranked them",
    "greedy": "Algorithm 1 of RAGCache++: at each node of the tree the cached child with the best retrieval rank",
    "prefix": "the longest cached prefix, the rest as ranked",
    "earned": "the default: the longest cached prefix, the rest as free while that has paid, else as ranked",
    "free": "the longest cached prefix, the rest in the order that later requests are expected to share",
    "events": "free, told by the server's KV events what is cached",
    "oracle": "reads the engine's cache, and does not look ahead",
}


def print_results(results: Sequence[RunResult], *, stderr: bool = False) -> None:
    """A table per workload, the seeds' mean in each row, and a second one for runs under load."""
    console = Console(stderr=stderr)
    for _, group in groupby(results, key=lambda result: (result.workload, result.order)):
        rows = list(group)
        console.print(results_table(rows))
        if rows[0].load is not None:
            console.print(deciles_table(rows))
    console.print(legend(results), style="dim")


def legend(results: Sequence[RunResult]) -> str:
    """Explanation of columns and policies."""
    names = dict.fromkeys(result.policy for result in results)
    policies = [f"{policy_words(name)}: {_POLICIES[name]}." for name in names if name in _POLICIES]
    return " ".join([_COLUMNS, *policies])


def results_table(results: Sequence[RunResult]) -> Table:
    """Policies compared on one workload: p50 ratios are to retrieval order, or to the first policy. Failed requests are
    in no other figure."""
    first = results[0]
    seeds = sorted({result.seed for result in results})
    capacity = "unlimited" if first.capacity_tokens is None else f"{first.capacity_tokens:,} tokens"
    extras = [f"{first.waiting} waiting"] * bool(first.waiting) + _batch(first) + _load(first)
    served = f"{first.requests:,} requests, top {first.top_k}"
    timed = any(result.ttft_ms is not None for result in results)
    answered = any(result.tbt_ms is not None for result in results)
    failed = any(result.failures for result in results)
    headings = [
        "policy",
        "cached\n%",
        "reordered\n(cold) %",
        "best\n1st %",
        "saved\neach",
        "places\nmoved",
        "pre-\ndicted",
    ]
    headings += ["TTFT ms\np50, mean", "p50\nratio"] * timed + ["TBT ms\np50, p99"] * answered + ["failed"] * failed
    table = Table(
        f"{first.workload} ({first.order} order) on {first.engine}: {served}",
        [*headings, "order µs\np50, p99"],
        note=", ".join([f"cache {capacity}", f"seeds {', '.join(map(str, seeds))}", *extras]),
    )
    by_policy: dict[str, list[RunResult]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    best = max(by_policy, key=lambda policy: _cached(by_policy[policy]))
    baseline = by_policy.get("retrieval", next(iter(by_policy.values())))
    for policy, rows in by_policy.items():
        predicted = [row.prediction_within_block for row in rows if row.prediction_within_block is not None]
        cells: list[str | Entry] = [
            f"{100 * _cached(rows):.1f}",
            *_moves(rows, baseline),
            f"{fmean(row.displacement_mean for row in rows):.2f}",
            f"{100 * fmean(predicted):.1f}" if predicted else "–",
        ]
        if timed:
            cells += _times(rows, baseline)
        if answered:
            cells += [_between_tokens(rows)]
        if failed:
            failures = sum(row.failures for row in rows)
            cells += [Entry(f"{failures:,}", tone="bad" if failures else "")]
        cells += [", ".join(f"{fmean(row.order_us[name] for row in rows):.0f}" for name in ("p50", "p99"))]
        table.add(policy_words(policy), *cells, tone="good" if policy == best else "")
    return table


def _cached(rows: Sequence[RunResult]) -> float:
    return fmean(row.cached_ratio for row in rows)


def _moves(rows: Sequence[RunResult], baseline: Sequence[RunResult]) -> list[str]:
    served = max(1, sum(row.requests - row.failures for row in rows))
    reordered, cold, best = (
        sum(getattr(row, name) for row in rows) for name in ("reordered", "reordered_cold", "best_moved")
    )
    saved = sum(row.cached_tokens for row in rows) - sum(row.cached_tokens for row in baseline)
    shares = [100 * part / served for part in (reordered, cold, served - best)]
    each = f"{saved / reordered:,.0f}" if reordered and baseline[0].policy == "retrieval" else "–"
    return [f"{shares[0]:.0f} ({shares[1]:.0f})", f"{shares[2]:.0f}", each]


def _times(rows: Sequence[RunResult], baseline: Sequence[RunResult]) -> list[str]:
    p50, mean, plain = _ttft(rows, "p50"), _ttft(rows, "mean"), _ttft(baseline, "p50")
    if p50 is None or mean is None:
        return ["–", "–"]
    return [f"{p50:.0f}, {mean:.0f}", f"{p50 / plain:.2f}" if plain else "–"]


def _between_tokens(rows: Sequence[RunResult]) -> str:
    known = [row.tbt_ms for row in rows if row.tbt_ms is not None]
    return ", ".join(f"{fmean(times[name] for times in known):.1f}" for name in ("p50", "p99")) if known else "–"


def _ttft(rows: Sequence[RunResult], name: str) -> float | None:
    return known_mean(row.ttft_ms[name] for row in rows if row.ttft_ms is not None)


def _batch(result: RunResult) -> list[str]:
    bound = "" if result.max_wait is None else f", at most {result.max_wait} places late"
    return [f"batch{bound}"] * result.batch


def _load(result: RunResult) -> list[str]:
    if result.load is None:
        return []
    bound, name, load = result.load["concurrency"], result.load["arrivals"], result.load
    words = [f"arrivals {name}"] if name else []
    words += [f"{load['time_scale']:g} times as fast"] if load["time_scale"] != 1 else []
    words += [f"{load['replicas']} requests each"] if load["replicas"] != 1 else []
    return words + ([f"{'at most ' if name else ''}{bound} in flight"] if bound else [])


def deciles_table(results: Sequence[RunResult]) -> Table:
    """The runs of one workload, tenth by tenth; memory is of this process, all policies together."""
    headings = [
        "policy",
        "tenth",
        "cached",
        "order µs\np50, p99",
        "off by\nblocks",
        "in flight",
        "memory\nMB",
        "tree\nnodes",
    ]
    table = Table(f"{results[0].workload}: the run in tenths", headings)
    for policy in dict.fromkeys(result.policy for result in results):
        runs = [result.deciles or [] for result in results if result.policy == policy]
        for tenth, rows in enumerate(zip(*runs, strict=False)):
            order_us = [f"{fmean(row.order_us[name] for row in rows):.0f}" for name in ("p50", "p99")]
            table.add(
                "" if tenth else policy_words(policy),
                str(tenth + 1),
                f"{100 * fmean(row.cached_ratio for row in rows):.1f} %",
                ", ".join(order_us),
                _number(known_mean(row.prediction_error_blocks_mean for row in rows), ".2f"),
                f"{fmean(row.in_flight_mean for row in rows):.1f}",
                _number(known_mean(row.rss_mb for row in rows), ",.0f"),
                _number(known_mean(row.tree_nodes for row in rows), ",.0f"),
            )
        table.divide()
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
