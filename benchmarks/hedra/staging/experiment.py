"""Searches in stages by themselves: the suites of kind "staging"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.hedra.staging.record import StagingCell, StagingRecord
from ragorder.common.files import cache_folder
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["Staging"]

RATIOS = (0.125, 0.25, 0.5, 1.0)
"""Shares of the clusters that a search scans: the vector search ratios of RAGCache's Figure 22."""

_DEPTHS = (1, 2, 5)
_TOP_K = 5


class Staging(Experiment):
    kind = "staging"
    record = StagingRecord
    cell = StagingCell
    policies: ClassVar[Any] = (
        *(f"IVF {ratio:g} {growth}" for ratio in RATIOS for growth in ("equal", "geometric")),
        *(f"HNSW {ef_search}" for ef_search in (64, 256)),
    )
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True

    def requests(self, suite: Suite, cell: StagingCell) -> int:
        return min(cell.queries, self.options.limit or cell.queries)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.hedra.staging.measuring import clustered, final_shares, searches, time_stages
        from ragorder.eval.suites.pipelining.search import embed

        cell: StagingCell = job.cell
        if job.corpus is None:
            documents = clustered(cell.vectors, cell.dimensions, clusters=cell.vectors // 50, seed=0)
            queries = clustered(cell.queries, cell.dimensions, clusters=cell.vectors // 50, seed=1)
        else:
            documents, queries = (
                embed([each.text for each in texts], cache_folder())
                for texts in (job.corpus.documents, job.corpus.questions)
            )
        for policy, search in searches(documents, cell.stages, job.policies):
            load = load_average()
            stages, rows = time_stages(search.index.search, search.staged, queries[: job.requests], _TOP_K)
            facts: dict[str, Any] = {"search": search.name, "stages": stages}
            if job.corpus is not None:
                final = final_shares(search.staged, queries, _DEPTHS)
                facts |= {"questions": len(queries), "final": {str(k): shares for k, shares in final.items()}}
            rounded = {name: [round(value, 4) for value in values] for name, values in rows.items()}
            yield {"policy": policy, "engine": {"name": "faiss"}, "load_average": load, "facts": facts, "rows": rounded}
            advance()
