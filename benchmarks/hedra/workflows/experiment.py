"""Workflows served on a virtual clock: the suites of kind "workflows"."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.hedra.workflows.costs import CLUSTERS
from ragorder.benchmarks.hedra.workflows.record import WorkflowsCell, WorkflowsRecord
from ragorder.benchmarks.hedra.workflows.systems import SYSTEMS
from ragorder.common.files import cache_folder
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.retrieval import DenseRetriever, default_model
from ragorder.eval.running.suite import Experiment, Job, Line

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.workflows.embedder import Embedder
    from ragorder.benchmarks.hedra.workflows.measuring import Materials

__all__ = ["Workflows"]


class Workflows(Experiment):
    kind = "workflows"
    record = WorkflowsRecord
    cell = WorkflowsCell
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"
    packages: ClassVar[Any] = {"faiss": "retrieval"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._embed: Embedder | None = None

    def steps(self, job: Job) -> int:
        return len(job.policies)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.hedra.workflows.measuring import serve
        from ragorder.eval.virtual.loop import run_virtual

        cell: WorkflowsCell = job.cell
        materials = self.kept((cell.corpus, cell.nprobe, job.seed), lambda: self._materials(job))
        at_s = [0.0] * job.requests
        if cell.rate:
            at_s = [arrival.at_s for arrival in poisson_arrivals(cell.rate, job.requests, job.seed)]
        draw = random.Random(job.seed)
        first, *others = cell.workflow.split("+")
        workflows = [
            first if not others or draw.random() < cell.share else draw.choice(others) for _ in range(job.requests)
        ]
        for policy in job.policies:
            yield {
                "policy": policy,
                "engine": {"name": "virtual", "model": cell.model},
                **run_virtual(serve(SYSTEMS[policy], cell, materials, at_s, workflows)),
            }
            advance()
        materials.embed.save()

    def _materials(self, job: Job) -> Materials:
        from ragorder.benchmarks.hedra.locality.measuring import build_index
        from ragorder.benchmarks.hedra.workflows.embedder import Embedder
        from ragorder.benchmarks.hedra.workflows.measuring import Materials
        from ragorder.benchmarks.hedra.workflows.script import Script
        from ragorder.eval.suites.pipelining.search import embed

        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        if self._embed is None:
            retriever = DenseRetriever(default_model())
            self._embed = Embedder(retriever.embed, cache_folder() / "workflow-vectors.npz")
        vectors = embed([each.text for each in corpus.documents], cache_folder())
        index = build_index(vectors, job.cell.nprobe / CLUSTERS)
        return Materials(corpus.documents, index, self._embed, Script(corpus, job.seed))
