"""Workflows on real parts, in real time: the suites of kind "workflows-live"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.cache_folder import cache_folder
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.data.retrieval import DenseRetriever, default_model
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.experiments.workflows_live.record import LiveCell, LiveRecord
from ragorder.eval.experiments.workflows_live.systems import SYSTEMS
from ragorder.eval.running.experiment import Experiment, Job, Line

if TYPE_CHECKING:
    from ragorder.eval.experiments.workflows_live.measuring import LiveMaterials
    from ragorder.eval.running.suite import Suite

__all__ = ["WorkflowsLive"]

_CAPACITY_REQUESTS = 32


class WorkflowsLive(Experiment):
    kind = "workflows-live"
    record = LiveRecord
    cell = LiveCell
    policies: ClassVar[Any] = tuple(SYSTEMS)
    one_job = True
    unit = "runs"

    def obstacle(self, suite: Suite, cell: LiveCell, policy: str) -> str | None:
        if find_spec("faiss") is None:
            return "searches need faiss: pip install 'ragorder[retrieval]'"
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def requests(self, suite: Suite, cell: LiveCell) -> int:
        return min(cell.requests, self.options.limit or cell.requests)

    def steps(self, job: Job) -> int:
        return len(job.policies) + 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.eval.experiments.embedded.clocks import threads
        from ragorder.eval.experiments.workflows_live.measuring import serve_live
        from ragorder.eval.experiments.workflows_live.parts import search_ms

        cell: LiveCell = job.cell
        key = (cell.corpus, cell.vectors, cell.clusters, cell.shape, job.seed)
        parts = self.kept(key, lambda: self._materials(job))
        parts.index.nprobe = min(cell.nprobe, cell.clusters)

        def serve(policy: str, at_s: list[float]) -> Any:
            with threads(1):
                return asyncio.run(serve_live(SYSTEMS[policy], cell.workflow, cell.top_k, parts, at_s))

        def capacity() -> dict[str, float]:
            full = serve("stages", [0.0] * min(_CAPACITY_REQUESTS, job.requests))
            queries = parts.embed(parts.script.question(0)).repeat(20, axis=0)
            rate = cell.load * len(full["rows"]["latency_s"]) / full["facts"]["total_s"]
            return {"rate": rate, "search_ms": search_ms(parts.index, queries)}

        before = self.measured_before(job)
        shared = capacity() if before is None else {name: before["facts"][name] for name in ("rate", "search_ms")}
        rate = shared["rate"]
        advance()
        at_s = [arrival.at_s for arrival in poisson_arrivals(rate, job.requests, job.seed)]
        for policy in job.policies:
            load = load_average()
            found = serve(policy, at_s)
            facts = found["facts"] | shared
            engine = {"name": "torch", "model": cell.shape}
            yield {"policy": policy, "engine": engine, "load_average": load, "rows": found["rows"], "facts": facts}
            advance()

    def _materials(self, job: Job) -> LiveMaterials:
        from ragorder.eval.experiments.embedded.shapes import SHAPES
        from ragorder.eval.experiments.pipelining.search import embed
        from ragorder.eval.experiments.workflows.embedder import Embedder
        from ragorder.eval.experiments.workflows.script import Script
        from ragorder.eval.experiments.workflows_live.measuring import LiveMaterials
        from ragorder.eval.experiments.workflows_live.parts import large_index

        corpus, cell = job.corpus, job.cell
        assert corpus is not None, "a cell has a corpus"
        vectors = embed([each.text for each in corpus.documents], cache_folder())
        index = large_index(vectors, cell.vectors, cell.clusters, cell.nprobe)
        embedder = Embedder(DenseRetriever(default_model()).embed)
        return LiveMaterials(corpus.documents, index, embedder, Script(corpus, job.seed), SHAPES[cell.shape].make())
