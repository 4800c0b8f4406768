"""Retrieval and generation within a memory budget on a virtual clock: the suites of kind "batching"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.doll.batching.record import BatchingCell, BatchingRecord
from ragorder.benchmarks.doll.batching.systems import SYSTEMS
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Batching"]


class Batching(Experiment):
    kind = "batching"
    record = BatchingRecord
    cell = BatchingCell
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"

    def obstacle(self, suite: Suite, cell: BatchingCell, policy: str) -> str | None:
        """Only systems that keep KV need a corpus."""
        return super().obstacle(suite, cell, policy) if SYSTEMS[policy].kept else None

    def corpus(self, cell: BatchingCell) -> Corpus | None:
        found = self._corpus(cell)
        return None if isinstance(found, str) else found

    def requests(self, suite: Suite, cell: BatchingCell) -> int:
        count = cell.arrivals.count or 0
        return min(count, self.options.limit or count)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching.prompts import Prompts
        from ragorder.benchmarks.doll.batching.serving import serve
        from ragorder.eval.virtual.loop import run_virtual

        cell: BatchingCell = job.cell
        arrivals = cell.arrivals
        at_s = [each.at_s for each in arrivals.draw(job.requests, job.seed)]
        for policy in job.policies:
            system = SYSTEMS[policy]
            prompts = None
            if system.kept and job.corpus is not None:
                prompts = Prompts.of(job.corpus, job.requests, top_k=cell.top_k, seed=job.seed)
            yield {
                "policy": policy,
                "engine": {"name": "virtual", "model": cell.setting},
                **run_virtual(serve(system, cell, at_s, arrivals.steps, prompts)),
            }
            advance()
