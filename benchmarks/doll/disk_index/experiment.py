"""Searches of vectors on disk: the suites of kind "disk-index"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from ragorder.benchmarks.doll.disk_index.record import DiskIndexCell, DiskIndexRecord
from ragorder.common.extras import install_hint
from ragorder.common.files import cache_folder
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["DiskIndex"]


class DiskIndex(Experiment):
    kind = "disk-index"
    record = DiskIndexRecord
    cell = DiskIndexCell
    policies: ClassVar[Any] = ("partitions", "codes", "codes refined")
    unit = "batches"
    one_job = True

    def obstacle(self, suite: Suite, cell: DiskIndexCell, policy: str) -> str | None:
        if find_spec("faiss") is None:
            return f"searches need faiss: {install_hint('retrieval')}"
        return super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.disk_index import measuring
        from ragorder.benchmarks.hedra.staging.measuring import clustered
        from ragorder.eval.suites.pipelining.search import embed

        cell: DiskIndexCell = job.cell
        if job.corpus is None:
            clusters = cell.vectors // 50
            vectors = clustered(cell.vectors, cell.dimensions, clusters=clusters, seed=2 * job.seed)
            queries = clustered(job.requests, cell.dimensions, clusters=clusters, seed=2 * job.seed + 1)
        else:
            vectors = embed([each.text for each in job.corpus.documents], cache_folder())
            queries = embed([each.text for each in job.corpus.questions[: job.requests]], cache_folder())
        for policy in job.policies:
            with TemporaryDirectory() as folder:
                found, recall = measuring.measure(policy, vectors, queries, cell, Path(folder))
            yield {
                "policy": policy,
                "engine": {"name": "faiss"},
                "rows": {},
                "facts": {
                    "memory_bytes": found.memory_bytes,
                    "read_bytes": found.read_bytes,
                    "recall": recall,
                    "vector_bytes": int(vectors.nbytes),
                },
            }
            advance()
