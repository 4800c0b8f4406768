"""Figures of runs of requests."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean

from ragorder.eval.report.declared import Column, Row
from ragorder.eval.report.words import format_number
from ragorder.eval.running.record import Record

__all__ = ["late_s", "mean_s", "share", "share_column", "shorter_column"]


def mean_s(run: Record) -> float:
    return fmean(run.rows["latency_s"])


def late_s(run: Record) -> float:
    """Return the 99th percentile of the latencies."""
    seconds: float = sorted(run.rows["latency_s"])[round(0.99 * (len(run.rows["latency_s"]) - 1))]
    return seconds


def share(runs: Iterable[Record], part: str, whole: str) -> float | None:
    """Return the sum of a fact over that of another one, or None if that is zero or missing."""
    facts = [run.facts for run in runs]
    total = sum(each.get(whole, 0) for each in facts)
    return sum(each[part] for each in facts) / total if total else None


def share_column(heading: str, part: str, whole: str) -> Column:
    def entry(found: float | None) -> str:
        return format_number(None if found is None else 100 * found)

    return Column(heading, lambda row: entry(share(row.runs, part, whole)))


def shorter_column(heading: str, baseline: str) -> Column:
    """Return a column of how many times shorter the mean latency is than a baseline's."""

    def entry(row: Row) -> str:
        mean, base = row.mean(mean_s), row.mean(mean_s, baseline)
        return format_number(base / mean if base and mean else None, 2)

    return Column(heading, entry)
