"""Workflows on a virtual clock, with costs fitted to data sheets or guessed (HedraRAG Figures 13 to 19)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.common.vectors import build_index, embedded
from ragorder.benchmarks.hedra.workflows.cells import CLUSTERS, System, WorkflowsCell
from ragorder.common.files import cache_folder
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.retrieval import DenseRetriever, default_model
from ragorder.eval.running.suite import Experiment, Job, Line
from ragorder.pipelining.workflow.transformations import (
    OrderDocuments,
    Reorder,
    SpeculateGeneration,
    SpeculateRetrieval,
    Split,
    Transformation,
)

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.workflows.measuring import Materials
    from ragorder.benchmarks.hedra.workflows.script import Embedder

__all__ = ["SYSTEMS", "Workflows"]

_AT_ONCE = 8


def _ours(*, across: bool = True) -> tuple[Transformation, ...]:
    generations = SpeculateGeneration(across=across)
    return (generations, SpeculateRetrieval(generations=generations), Split(), Reorder())


def _ordered() -> tuple[Transformation, ...]:
    return (*_ours(), OrderDocuments())


SYSTEMS = {
    "langchain": System("batches stage by stage (LangChain)", "alone", lockstep=32),
    "flashrag": System("whole searches batched (FlashRAG)", "batch"),
    "dealt": System("whole searches batched, dealt to all cores", "dealt"),
    "pieces": System("searches in pieces", transformations=lambda: (Split(),)),
    "ragcache": System(
        "Algorithm 2 alone (RAGCache)", transformations=lambda: (SpeculateGeneration(odds=False), Split())
    ),
    "ralmspec": System(
        "local cache alone (RaLMSpec)",
        transformations=lambda: (SpeculateGeneration(odds=False, recalled_only=True), Split(), Reorder()),
    ),
    "hedra": System("ours", transformations=_ours),
    "hedra-across": System("ours, one stage ahead", transformations=lambda: _ours(across=False)),
    "hedra+order": System("ours, ordered", transformations=_ordered),
    "hedra+line": System(
        "ours, ordered, 8 on the engine", transformations=_ordered, max_generations=_AT_ONCE, window=0
    ),
    "hedra+next": System("the same, most cached first", transformations=_ordered, max_generations=_AT_ONCE),
    "hedra+fast": System("ours, a GPU beside the cores", transformations=_ours, fast=True),
}
"""By policy. LangChain's `batch` runs a chain in lockstep; its default pool has 32 threads. RAGCache and RaLMSpec
search in pieces, as in the paper, which gave both to its own system."""


class Workflows(Experiment):
    """Columns: seconds from each request's arrival to its answer, and its workflow. Facts: see `serve`."""

    kind = "workflows"
    cell = WorkflowsCell
    columns = ("latency_s", "workflow")
    facts = ("total_s", "prompt_tokens", "computed_tokens")
    runs = True
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._embed: Embedder | None = None

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
        from ragorder.benchmarks.hedra.workflows.measuring import Materials
        from ragorder.benchmarks.hedra.workflows.script import Embedder, Script

        corpus = job.corpus
        assert corpus is not None, "a cell has a corpus"
        if self._embed is None:
            retriever = DenseRetriever(default_model())
            self._embed = Embedder(retriever.embed, cache_folder() / "workflow-vectors.npz")
        index = build_index(embedded(each.text for each in corpus.documents), job.cell.nprobe / CLUSTERS)
        return Materials(corpus.documents, index, self._embed, Script(corpus, job.seed))
