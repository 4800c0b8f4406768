"""Table of a GPU day: what was measured, what was left out, and how long it took."""

from __future__ import annotations

from ragorder.benchmarks.kernels.gpu_day.parts import PARTS
from ragorder.benchmarks.kernels.gpu_day.record import GpuDayRecord
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Suite

__all__ = ["make_part"]

_HEADINGS = ("part", "what it shows", "suite", "state", "jobs", "left out", "minutes", "of at most")
_SMALL = (
    "This was a small day on {device}: it shows that every part runs, and nothing about a GPU. Its figures are of tiny "
    "models and few requests."
)


def make_part(suite: Suite, results: Results) -> Part:
    records = results.of(GpuDayRecord, suite.name)
    days = [small for small in (False, True) if any(record.cell["small"] is small for record in records)]
    tables, words = [], []
    for small in days:
        found = [record for record in records if record.cell["small"] is small]
        tables.append(_table(found, small=small))
        devices = {record.facts["device"] for record in found if record.ended}
        words += [_SMALL.format(device=", ".join(sorted(devices)) or "a CPU")] if small else []
    return Part(tables, words=words)


def _table(records: list[GpuDayRecord], *, small: bool) -> Table:
    table = Table("Parts" + " of a small day" * small, list(_HEADINGS), labels=4)
    for name, part in PARTS.items():
        jobs = [record for record in records if record.facts["part"] == name and not record.ended]
        end = next((record for record in records if record.facts["part"] == name and record.ended), None)
        if end is None:
            state, left = ("goes on with the next call", "–") if jobs else ("not begun", "–")
        else:
            left = str(end.facts["left"])
            state = "out of time" if end.facts["left"] else "whole" if jobs else "nothing to measure"
        taken = sum(record.seconds for record in jobs)
        table.add(
            name,
            part.shows,
            (part.small_suite if small else None) or part.suite,
            state,
            str(len(jobs)),
            left,
            format_number(taken / 60),
            format_number(part.minutes, 0),
        )
    table.note = (
        "A job is a cell of the suite. Figures are in the suites' own sections, what failed among what is missing."
    )
    return table
