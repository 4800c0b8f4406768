"""Searches that arrive one by one, in pieces and in batches (HedraRAG section 4.2; suite hedra-partition)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.common.served import Cells, cells_along, draw_table, faster_entry
from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.report.part import Part
from ragorder.eval.report.tables import Table
from ragorder.eval.report.words import format_number
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.reading import Results
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.common.virtual.costs import ScanCosts
    from ragorder.benchmarks.hedra.partition.engines import Clock, System

    Prepared = tuple[Callable[[str], tuple[System, Clock]], Callable[[], dict[str, float]]]
    """Each policy's engine with its clock, and a function that measures the facts."""

_LOOKS = {
    "batches": "retrieval",
    "batches by clusters": "sorted",
    "equal shares": "none",
    "oldest first": "earned",
    "shortest first": "prefix",
}
_MIXED = (0.25, 0.5, 1.0, 2.0)
_MEASURED = 40
_BATCHES = ("batches", "batches by clusters")


class PartitionCell(SuiteCell):
    """Single searches that arrive at random (Poisson), at `load` of what `cores` can do.

    - real: random `vectors` in an IVF index of 4 sqrt(n) clusters; a search scans the share `nprobe` of them;
      `mixed`: a quarter, half, all, or twice of that
    - virtual: HedraRAG's index (38 million vectors of 1,024 dimensions, 4,096 clusters, nprobe 256), by costs that the
      real clock's facts say: of a code of 128 dimensions and a call, of a piece, and of handing a share to a thread
    """

    clock: Literal["real", "virtual"] = "real"
    cores: int = Field(1, ge=1)
    load: float = Field(0.5, gt=0, lt=1)
    mixed: bool = False
    vectors: int = Field(200_000, ge=1000)
    dimensions: int = Field(128, ge=1)
    nprobe: float = Field(0.25, gt=0, le=0.5)
    requests: int = Field(150, ge=1)
    code_ns: float = Field(77.0, gt=0)
    call_us: float = Field(90.0, gt=0)
    overhead_ms: float = Field(0.2, gt=0)
    hand_us: float = Field(12.0, gt=0)


class Partition(Experiment):
    """Column `latency_ms`. Facts: `search_ms`, a whole search on one core, and the costs of a virtual clock."""

    kind = "partition"
    cell = PartitionCell
    columns = ("latency_ms",)
    facts = ("search_ms",)
    policies: ClassVar[Any] = (*_BATCHES, "equal shares", "oldest first", "shortest first")
    unit = "searches"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    one_job = True

    def obstacle(self, suite: Suite, cell: PartitionCell, policy: str) -> str | None:
        if cell.clock == "real" and cell.cores > (os.cpu_count() or 1):
            return f"{cell.cores} cores are more than this machine has"
        return super().obstacle(suite, cell, policy)

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.hedra.partition.engines import play

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
                system, clock = system_of(policy)
                latencies = play(system, [each.at_s for each in arrivals], clock)
                yield {
                    "policy": policy,
                    "engine": {"name": "faiss"},
                    "facts": facts,
                    "rows": {"latency_ms": [round(1e3 * seconds, 4) for seconds in latencies]},
                }
                for _ in latencies:
                    advance()

    def _real(self, job: Job, shares: Sequence[float], stack: ExitStack) -> Prepared:
        from ragorder.benchmarks.hedra.partition import engines
        from ragorder.pipelining.staged._faiss import load_faiss

        cell: PartitionCell = job.cell
        faiss = load_faiss()
        stack.callback(faiss.omp_set_num_threads, faiss.omp_get_max_threads())
        queries = clustered(job.requests, cell.dimensions, clusters=cell.vectors // 50, seed=job.seed + 1)

        def start() -> tuple[Any, Callable[[], dict[str, float]]]:
            vectors = clustered(cell.vectors, cell.dimensions, clusters=cell.vectors // 50, seed=0)
            index = build_index(vectors, cell.nprobe, sampled=True)
            faiss.omp_set_num_threads(1)

            def measure_costs() -> dict[str, float]:
                piece = {"piece_cpu_us": 1e6 * engines.piece_cpu_seconds(index, queries[:_MEASURED])}
                return _facts(engines.measure_costs(index, queries[:_MEASURED])) | piece

            return index, cache(measure_costs)

        index, costs = self.kept((cell.vectors, cell.dimensions, cell.nprobe), start)
        nprobes = [max(1, round(share * cell.nprobe * index.nlist)) for share in shares]

        def measure() -> dict[str, float]:
            return {"search_ms": 1e3 * engines.search_seconds(index, queries, nprobes), **costs()}

        def system_of(policy: str) -> tuple[System, Clock]:
            if policy in _BATCHES:
                by_clusters = policy == _BATCHES[1]
                batches = engines.RealBatches(index, queries, nprobes, cell.cores, by_clusters=by_clusters)
                return batches, engines.RealClock()
            search = stack.enter_context(engines.pieces_of(index, policy, cell.cores))
            return engines.RealPieces(search, queries, nprobes), engines.RealClock()

        return system_of, measure


def _virtual(job: Job, shares: Sequence[float], stack: ExitStack) -> Prepared:
    from ragorder.benchmarks.common.virtual.costs import ScanCosts
    from ragorder.benchmarks.hedra.partition import engines

    cell: PartitionCell = job.cell
    code_s = 1e-9 * cell.code_ns * engines.PAPER_DIMENSIONS / 128
    costs = ScanCosts(code_s, 1e-6 * cell.call_us, 1e-3 * cell.overhead_ms, 1e-6 * cell.hand_us)
    nprobes = [max(1, round(share * engines.PAPER_NPROBE)) for share in shares]
    index = engines.VirtualIndex(engines.paper_sizes(), nprobes, job.seed)

    def system_of(policy: str) -> tuple[System, Clock]:
        clock = engines.VirtualClock()
        if policy in _BATCHES:
            by_clusters = policy == _BATCHES[1]
            return engines.VirtualBatches(index, costs, cell.cores, clock, by_clusters=by_clusters), clock
        return engines.VirtualPieces(index, costs, cell.cores, clock, policy), clock

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


def make_part(suite: Suite, results: Results) -> Part:
    found = cells_along("load", Partition, suite, results)
    tables = [_table(each, suite.baseline) for each in found]
    lines = [table for table in tables if len(table.headings) > 2]
    return Part(tables, pictures=lambda: [draw_table(each, "", "mean latency, ms", rows=_LOOKS) for each in lines])


def _title(cell: PartitionCell) -> str:
    cores = f"{cell.cores} core{'s' if cell.cores > 1 else ''}"
    return f"{cores}, {cell.clock} clock, {'mixed nprobe' if cell.mixed else 'one nprobe'}"


def _table(cells: Cells, baseline: str) -> Table:
    loads = [f"load {cell.load:g}" for cell, _ in cells]
    table = Table(f"Mean latency, and how many times as fast as {baseline}: {_title(cells[0][0])}", ["search", *loads])
    policies = dict.fromkeys(policy for _, group in cells for policy in group.policies)
    for policy in policies:
        table.add(policy, *(faster_entry(group, policy, baseline, interval=True) for _, group in cells))
    facts = [run.facts for _, group in cells for run in group.runs()]
    search_ms = sum(each["search_ms"] for each in facts) / len(facts)
    table.note = f"ms; a whole search takes {format_number(search_ms)} ms of one core."
    if pieces := [each["piece_cpu_us"] for each in facts if "piece_cpu_us" in each]:
        piece_us = format_number(sum(pieces) / len(pieces), 0)
        table.note += f" A piece takes {piece_us} µs of CPU time beside its scan, with 100 searches in flight."
    return table
