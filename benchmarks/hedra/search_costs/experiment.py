"""The smallest pieces of work: the suites of kind "search-costs"."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, ClassVar

from ragorder.benchmarks.hedra.search_costs.record import CostsCell, CostsRecord
from ragorder.eval.data.machine import load_average
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["SearchCosts"]

_QUERIES = 40
_BATCHES = (1, 4, 16, 64)
_NPROBE = 0.25
_REQUESTS = (1, 2, 4, 8, 16)
_CONTEXTS = (128, 512, 1024)


class SearchCosts(Experiment):
    kind = "search-costs"
    record = CostsRecord
    cell = CostsCell
    policies: ClassVar[Any] = ("scans", "decoding")
    unit = "measurements"
    packages: ClassVar[Any] = {"faiss": "retrieval"}

    def obstacle(self, suite: Suite, cell: CostsCell, policy: str) -> str | None:
        return (lacks_torch() if policy == "decoding" else None) or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        for policy in job.policies:
            load = load_average()
            found = _scans(job.cell) if policy == "scans" else _decoding(job.cell)
            yield {"policy": policy, "load_average": load, **found}
            advance()


def _scans(cell: CostsCell) -> dict[str, Any]:
    from ragorder.benchmarks.hedra.partition.real import build_index
    from ragorder.benchmarks.hedra.search_costs import measuring
    from ragorder.benchmarks.hedra.staging.measuring import clustered

    index = build_index(cell.vectors, cell.dimensions)
    index.nprobe = max(1, round(_NPROBE * index.nlist))
    queries = clustered(max(_BATCHES), cell.dimensions, clusters=cell.vectors // 50, seed=1)
    facts = {
        "clusters": [round(each, 5) for each in measuring.cluster_ms(index, queries[0])],
        "queries": {str(batch): measuring.batch_ms(index, queries[:batch]) for batch in _BATCHES},
    }
    return {"engine": {"name": "faiss"}, "facts": facts, "rows": measuring.scans(index, queries[:_QUERIES], cell.calls)}


def _decoding(cell: CostsCell) -> dict[str, Any]:
    from ragorder.benchmarks.hedra.search_costs import measuring
    from ragorder.benchmarks.kernels.embedded.models import SHAPES, threads
    from ragorder.eval.engines.torch import TorchEngine

    rows: dict[str, list[float]] = {"requests": [], "context": [], "ms": []}
    shape = SHAPES[cell.shape]
    with threads(1), closing(TorchEngine(shape.make())) as engine:
        for requests in _REQUESTS:
            for context in _CONTEXTS:
                ms = measuring.decoding_ms(engine, shape.vocabulary, requests, context, cell.steps)
                for name, value in (("requests", requests), ("context", context), ("ms", round(ms, 4))):
                    rows[name].append(value)
    return {"engine": {"name": "torch", "model": cell.shape}, "rows": rows}
