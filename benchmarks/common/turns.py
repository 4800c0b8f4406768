"""Processor time of policies that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from ragorder.eval.report.declared import Column, figure
from ragorder.eval.running.suite import Experiment, Job, Line


class InTurns(Experiment):
    """Column `ms`: a policy's processor time in each of the cell's `repeats`; facts of the last one."""

    columns = ("ms",)
    unit = "repeats"
    one_job = True

    def steps(self, job: Job) -> int:
        return len(job.policies) * int(job.cell.repeats)

    def in_turns(
        self, job: Job, advance: Callable[[], None], measure: Callable[[str], tuple[float, dict[str, Any]]]
    ) -> Iterator[Line]:
        """Yield the lines of a job; `measure` returns milliseconds and facts of a policy."""
        times: dict[str, list[float]] = {policy: [] for policy in job.policies}
        facts: dict[str, Any] = {}
        for _ in range(job.cell.repeats):
            for policy in job.policies:
                ms, facts[policy] = measure(policy)
                times[policy].append(round(ms, 5))
                advance()
        for policy in job.policies:
            yield {
                "policy": policy,
                "engine": {"name": "played"},
                "facts": facts[policy],
                "rows": {"ms": times[policy]},
            }


def median_ms(run: Any) -> float:
    return float(median(run.rows["ms"]))


def ms_columns(each: str, decimals: int) -> list[Column]:
    """Return median, least and most of the repeats."""
    return [
        figure(f"ms a {each}", median_ms, decimals),
        figure("least", lambda run: min(run.rows["ms"]), decimals),
        figure("most", lambda run: max(run.rows["ms"]), decimals),
    ]
