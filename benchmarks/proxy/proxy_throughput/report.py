"""Table of the rates that the proxy holds."""

from __future__ import annotations

from statistics import median

from ragorder.benchmarks.proxy.proxy_throughput.record import ThroughputCell, ThroughputRecord
from ragorder.eval.report.groups import group_runs
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Entry, Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_HEADINGS = [
    "workers",
    "mode",
    "held, requests/s",
    "added there, p50 / p99, ms",
    "CPU of a request, ms",
    "requests/s a core",
]
_NOTE = (
    "Held: the highest rate at which the proxy adds at most {added:g} ms to 99 of 100 requests; if it is the last one, "
    "the machine may have been at its end before the proxy was. Requests a second of one core: of the proxy's own "
    "processor time at the rate held. Median of {seeds} seeds, in brackets their range."
)


def make_part(suite: Suite, results: Results) -> Part:
    groups = group_runs(results.of(ThroughputRecord, suite.name))
    table = Table("Rates", _HEADINGS, labels=2)
    for group in groups:
        cell = ThroughputCell.model_validate(group.cell)
        table.note = _NOTE.format(added=cell.added_ms, seeds=len(group.seeds))
        for policy in group.policies:
            held = [run for run in group.runs(policy) if run.best is not None]
            if not held:
                table.add(str(cell.workers), policy, "none", "–", "–", "–")
                continue
            at = [{name: run.rows[name][run.best] for name in run.rows} for run in held]
            p50, p99 = (
                format_number(median(each[name] for each in at), 1) for name in ("added_p50_ms", "added_p99_ms")
            )
            used = [each["cpu_ms"] for each in at if each["cpu_ms"]]
            table.add(
                str(cell.workers),
                policy,
                _of_seeds([each["came"] for each in at]),
                f"{p50} / {p99}",
                format_number(median(used), 2) if used else "–",
                format_number(1e3 / median(used), 0) if used else "–",
            )
    return Part([table] if table.rows else [])


def _of_seeds(rates: list[float]) -> Entry:
    note = f"{format_number(min(rates), 0)} to {format_number(max(rates), 0)}" if len(rates) > 1 else ""
    return Entry(format_number(median(rates), 0), note=note)
