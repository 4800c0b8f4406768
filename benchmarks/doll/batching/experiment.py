"""Retrieval and generation within a memory budget on a virtual clock, with costs fitted to RAGDoll's figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from ragorder.benchmarks.doll.batching.cells import BatchingCell, System
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

__all__ = ["SYSTEMS", "Batching"]

SYSTEMS = {
    "accrag": System("serial static batches, accelerate (AccRAG)", "accelerate", True, "rate", placed=False),
    "vllmrag": System("serial static batches, vLLM (vLLMRAG)", "vllm", True, "rate", placed=False),
    "flexgen": System("serial static batches, one layer ahead (FlexGen)", "prefetch", True, "rate", False, depth=1),
    "ragdoll": System("RAGDoll"),
    "ragdoll-serial": System("RAGDoll, not pipelined", serial=True),
    "ragdoll-fixed": System("RAGDoll, fixed batches", sizes="fixed"),
    "ragdoll-depth1": System("RAGDoll, one layer ahead (FlexGen)", depth=1),
    "ragdoll-depth0": System("RAGDoll, no prefetch", depth=0),
    "ragdoll-unplaced": System("RAGDoll, no resident partitions", placed=False),
    "server": System("RAGDoll's batches by DecoupledServer", server=True),
    "joined": System("requests join at each step", joined=True),
    "kept": System("and prefixes are kept", joined=True, kept="rank"),
    "ours": System("and documents are ordered (ours)", joined=True, kept="ordered"),
    "ours-server": System("the same by DecoupledServer", joined=True, kept="ordered", server=True),
    "ours+passes": System("ours, and requests join a pass", joined=True, kept="ordered", passes=True),
    "ours-server+passes": System("the same by DecoupledServer", joined=True, kept="ordered", passes=True, server=True),
}
"""By policy; from "joined" each adds to the one before."""


class Batching(Experiment):
    """Columns: of each request its arrival, and seconds that it waited, was searched for and was generated for. Facts:
    see `serve`."""

    kind = "batching"
    cell = BatchingCell
    columns = ("latency_s", "at_s", "waiting_s", "retrieval_s", "generation_s")
    facts = ("total_s", "searching_s", "generating_s", "trace")
    runs = True
    policies: ClassVar[Any] = tuple(SYSTEMS)
    unit = "runs"
    counts = "policies"

    def obstacle(self, suite: Suite, cell: BatchingCell, policy: str) -> str | None:
        """Only systems that keep KV need a corpus."""
        return super().obstacle(suite, cell, policy) if SYSTEMS[policy].kept else None

    def corpus(self, cell: BatchingCell) -> Corpus | None:
        found = self._corpus(cell)
        return None if isinstance(found, str) else found

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.doll.batching.generation import Prompts
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
