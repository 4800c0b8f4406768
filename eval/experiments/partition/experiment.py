"""Searches that arrive one by one, in pieces and in batches: the suites of kind "partition"."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.experiments.partition.record import PartitionCell, PartitionRecord
from ragorder.eval.running.experiment import Experiment, Job, Line

if TYPE_CHECKING:
    from ragorder.eval.experiments.partition.playing import Clock, System
    from ragorder.eval.experiments.partition.real import MeasuredCosts
    from ragorder.eval.running.suite import Suite

__all__ = ["Partition"]

# Of HedraRAG's index: 38 million vectors.
_PAPER_VECTORS, _PAPER_DIMENSIONS, _PAPER_CLUSTERS, _PAPER_NPROBE = 38_000_000, 1024, 4096, 256
_MIXED = (0.25, 0.5, 1.0, 2.0)
_MEASURED = 40
_BATCHES = ("batches", "batches by clusters")


class Partition(Experiment):
    kind = "partition"
    record = PartitionRecord
    cell = PartitionCell
    policies: ClassVar[Any] = (*_BATCHES, "equal shares", "oldest first", "shortest first")
    unit = "searches"
    one_job = True

    def obstacle(self, suite: Suite, cell: PartitionCell, policy: str) -> str | None:
        if find_spec("faiss") is None:
            return "searches need faiss: pip install 'ragorder[retrieval]'"
        if cell.clock == "real" and cell.cores > (os.cpu_count() or 1):
            return f"{cell.cores} cores are more than this machine has"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        import faiss

        from ragorder.eval.experiments.partition.playing import play
        from ragorder.eval.experiments.partition.real import build_index, measure_costs
        from ragorder.eval.experiments.staging.measuring import clustered

        cell: PartitionCell = job.cell
        threads = faiss.omp_get_max_threads()
        try:
            queries = clustered(job.requests, cell.dimensions, clusters=cell.vectors // 50, seed=job.seed + 1)

            def start() -> tuple[Any, MeasuredCosts]:
                index = build_index(cell.vectors, cell.dimensions)
                faiss.omp_set_num_threads(1)
                return index, measure_costs(index, queries[:_MEASURED], max(1, round(cell.nprobe * index.nlist)))

            index, costs = self.kept((cell.vectors, cell.dimensions, cell.nprobe), start)
            search_s, system_of = _systems(cell, job, index, queries, costs)
            arrivals = poisson_arrivals(cell.load * cell.cores / search_s, job.requests, job.seed)
            facts = {
                "search_ms": 1e3 * search_s,
                "overhead_ms": 1e3 * costs.overhead_s,
                "code_ns": 1e9 * costs.code_s,
                "call_us": 1e6 * costs.call_s,
                "hand_us": 1e6 * costs.hand_s,
            }
            for policy in job.policies:
                before = load_average()
                with ExitStack() as stack:
                    system, clock = system_of(policy, stack)
                    latencies = play(system, [each.at_s for each in arrivals], clock)
                yield {
                    "policy": policy,
                    "engine": {"name": "faiss"},
                    "load_average": before,
                    "facts": facts,
                    "rows": {"latency_ms": [round(1e3 * seconds, 4) for seconds in latencies]},
                }
                for _ in latencies:
                    advance()
        finally:
            faiss.omp_set_num_threads(threads)


def _systems(
    cell: PartitionCell, job: Job, index: Any, queries: Any, costs: MeasuredCosts
) -> tuple[float, Callable[[str, ExitStack], tuple[System, Clock]]]:
    """Mean seconds of a search on one core, and each policy's engine with its clock."""
    import numpy as np

    from ragorder.eval.experiments.partition import playing, real, virtual

    draw = random.Random(f"nprobe {job.seed}")
    shares = [draw.choice(_MIXED) if cell.mixed else 1.0 for _ in range(job.requests)]
    if cell.clock == "real":
        nprobes = [max(1, round(share * cell.nprobe * index.nlist)) for share in shares]

        def on_faiss(policy: str, stack: ExitStack) -> tuple[System, Clock]:
            if policy in _BATCHES:
                by_clusters = policy == _BATCHES[1]
                batches = real.RealBatches(index, queries, nprobes, cell.cores, by_clusters=by_clusters)
                return batches, playing.RealClock()
            search = stack.enter_context(real.pieces_of(index, policy, cell.cores))
            return real.RealPieces(search, queries, nprobes), playing.RealClock()

        return real.search_seconds(index, queries, nprobes), on_faiss

    sizes = np.array([index.get_list_size(cluster) for cluster in range(index.nlist)])
    resampled = np.random.default_rng(0).choice(sizes, _PAPER_CLUSTERS).astype(float)
    scaled = np.round(resampled * _PAPER_VECTORS / resampled.sum()).astype(np.int64)
    nprobes = [max(1, round(share * _PAPER_NPROBE)) for share in shares]
    large = virtual.VirtualIndex(scaled, nprobes, job.seed)
    costs = costs._replace(code_s=costs.code_s * _PAPER_DIMENSIONS / cell.dimensions)

    def on_virtual(policy: str, stack: ExitStack) -> tuple[System, Clock]:
        clock = playing.VirtualClock()
        if policy in _BATCHES:
            by_clusters = policy == _BATCHES[1]
            return virtual.VirtualBatches(large, costs, cell.cores, clock, by_clusters=by_clusters), clock
        return virtual.VirtualPieces(large, costs, cell.cores, clock, policy), clock

    return costs.call_s + costs.code_s * large.mean_codes, on_virtual
