"""Requests to simulated clouds: the suites of kind "clouds"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.chats.clouds.chats import CHATS
from ragorder.benchmarks.chats.clouds.measuring import serve
from ragorder.benchmarks.chats.clouds.policies import POLICIES
from ragorder.benchmarks.chats.clouds.record import CloudsCell, CloudsRecord
from ragorder.benchmarks.chats.clouds.talking import serve_conversations, talks
from ragorder.clouds import CacheRules, cache_rules
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.running.cells import SuiteError
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Clouds"]


class Clouds(Experiment):
    kind = "clouds"
    record = CloudsRecord
    cell = CloudsCell
    policies: ClassVar[Any] = tuple(POLICIES)

    @classmethod
    def cells(cls, suite: Suite, where: str) -> Iterator[Any]:
        for cell in super().cells(suite, where):
            try:
                _rules(cell)
            except ValueError as error:
                raise SuiteError(f"{where}: {error}") from None
            yield cell

    def obstacle(self, suite: Suite, cell: CloudsCell, policy: str) -> str | None:
        if self.options.engine != "sim":
            return "clouds are simulated: run it without --engine"
        if cell.converses and policy not in CHATS:
            return f"conversations are sent by {', '.join(CHATS)}"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        cell: CloudsCell = job.cell
        rules = _rules(cell)
        if cell.converses:
            conversations = talks(max(1, job.requests // cell.turns), cell.turns, job.seed)
        else:
            rankings = make_workload(cell.workload, job.seed, requests=job.requests).rankings[: job.requests]
        for policy in job.policies:
            if cell.converses:
                rows = serve_conversations(conversations, cell, rules, policy, job.seed, advance)
            else:
                rows = serve(rankings, cell, rules, policy, job.seed, advance)
            yield {
                "policy": policy,
                "engine": {"name": "simulated cloud", "model": cell.model},
                "rows": rows,
                "facts": {"write": rules.write, "read": rules.read, "minimum": rules.minimum_tokens},
            }


def _rules(cell: CloudsCell) -> CacheRules:
    return cache_rules(cell.provider, cell.model, cell.ttl)
