"""Searches that arrive one by one, in pieces and in batches: the suites of kind "partition"."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.hedra.partition.record import PartitionCell, PartitionRecord
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.partition.playing import Clock, System
    from ragorder.eval.virtual.costs import ScanCosts

    Prepared = tuple[Callable[[str], tuple[System, Clock]], Callable[[], dict[str, float]]]
    """Each policy's engine with its clock, and a function that measures the facts."""

__all__ = ["Partition"]

_MIXED = (0.25, 0.5, 1.0, 2.0)
_MEASURED = 40
_BATCHES = ("batches", "batches by clusters")


class Partition(Experiment):
    kind = "partition"
    record = PartitionRecord
    cell = PartitionCell
    policies: ClassVar[Any] = (*_BATCHES, "equal shares", "oldest first", "shortest first")
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True

    def obstacle(self, suite: Suite, cell: PartitionCell, policy: str) -> str | None:
        if cell.clock == "real" and cell.cores > (os.cpu_count() or 1):
            return f"{cell.cores} cores are more than this machine has"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.hedra.partition.playing import play

        cell: PartitionCell = job.cell
        draw = random.Random(f"nprobe {job.seed}")
        shares = [draw.choice(_MIXED) if cell.mixed else 1.0 for _ in range(job.requests)]
        prepare = self._real if cell.clock == "real" else _virtual
        with ExitStack() as stack:
            system_of, measure = prepare(job, shares, stack)
            known = self.measured_before(job)
            facts = measure() if known is None else known["facts"]
            arrivals = poisson_arrivals(1e3 * cell.load * cell.cores / facts["search_ms"], job.requests, job.seed)
            for policy in job.policies:
                before = load_average()
                system, clock = system_of(policy)
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

    def _real(self, job: Job, shares: Sequence[float], stack: ExitStack) -> Prepared:
        from ragorder.benchmarks.hedra.partition import playing, real
        from ragorder.benchmarks.hedra.staging.measuring import clustered
        from ragorder.pipelining.staged._faiss import load_faiss

        cell: PartitionCell = job.cell
        faiss = load_faiss()
        stack.callback(faiss.omp_set_num_threads, faiss.omp_get_max_threads())
        queries = clustered(job.requests, cell.dimensions, clusters=cell.vectors // 50, seed=job.seed + 1)

        def start() -> tuple[Any, Callable[[], dict[str, float]]]:
            index = real.build_index(cell.vectors, cell.dimensions)
            faiss.omp_set_num_threads(1)
            index.nprobe = max(1, round(cell.nprobe * index.nlist))

            def measure_costs() -> dict[str, float]:
                piece = {"piece_cpu_us": 1e6 * real.piece_cpu_seconds(index, queries[:_MEASURED])}
                return _facts(real.measure_costs(index, queries[:_MEASURED])) | piece

            return index, cache(measure_costs)

        index, costs = self.kept((cell.vectors, cell.dimensions, cell.nprobe), start)
        nprobes = [max(1, round(share * cell.nprobe * index.nlist)) for share in shares]

        def measure() -> dict[str, float]:
            return {"search_ms": 1e3 * real.search_seconds(index, queries, nprobes), **costs()}

        def system_of(policy: str) -> tuple[System, Clock]:
            if policy in _BATCHES:
                by_clusters = policy == _BATCHES[1]
                batches = real.RealBatches(index, queries, nprobes, cell.cores, by_clusters=by_clusters)
                return batches, playing.RealClock()
            search = stack.enter_context(real.pieces_of(index, policy, cell.cores))
            return real.RealPieces(search, queries, nprobes), playing.RealClock()

        return system_of, measure


def _virtual(job: Job, shares: Sequence[float], stack: ExitStack) -> Prepared:
    from ragorder.benchmarks.hedra.partition import playing, virtual
    from ragorder.eval.virtual.costs import ScanCosts

    cell: PartitionCell = job.cell
    code_s = 1e-9 * cell.code_ns * virtual.PAPER_DIMENSIONS / 128
    costs = ScanCosts(code_s, 1e-6 * cell.call_us, 1e-3 * cell.overhead_ms, 1e-6 * cell.hand_us)
    nprobes = [max(1, round(share * virtual.PAPER_NPROBE)) for share in shares]
    index = virtual.VirtualIndex(virtual.paper_sizes(), nprobes, job.seed)

    def system_of(policy: str) -> tuple[System, Clock]:
        clock = playing.VirtualClock()
        if policy in _BATCHES:
            by_clusters = policy == _BATCHES[1]
            return virtual.VirtualBatches(index, costs, cell.cores, clock, by_clusters=by_clusters), clock
        return virtual.VirtualPieces(index, costs, cell.cores, clock, policy), clock

    def measure() -> dict[str, float]:
        return {"search_ms": 1e3 * costs.scan_seconds(index.mean_codes), **_facts(costs)}

    return system_of, measure


def _facts(costs: ScanCosts) -> dict[str, float]:
    return {
        "overhead_ms": 1e3 * costs.piece_s,
        "code_ns": 1e9 * costs.code_s,
        "call_us": 1e6 * costs.call_s,
        "hand_us": 1e6 * costs.hand_s,
    }
