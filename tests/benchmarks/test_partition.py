"""Searches that share their time, played in real and virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")
pytest.importorskip("scipy")


from ragorder.benchmarks.common.virtual.costs import ScanCosts
from ragorder.benchmarks.hedra.partition import engines, experiment
from ragorder.benchmarks.hedra.partition.experiment import PartitionCell
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.running.load import silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Job, Suite

POLICIES = ("equal shares", "oldest first", "shortest first")
COSTS = ScanCosts(code_s=1e-3, piece_s=1e-3)


def played(policy: str, nprobes: Sequence[int], at_s: Sequence[float], cores: int = 1) -> tuple[list[float], float]:
    """Latencies and the time at the end, on clusters of ten vectors."""
    index, clock = engines.VirtualIndex(np.full(100, 10), nprobes, seed=0), engines.VirtualClock()
    if policy.startswith("batches"):
        system: Any = engines.VirtualBatches(index, COSTS, cores, clock, by_clusters="by" in policy)
    else:
        system = engines.VirtualPieces(index, COSTS, cores, clock, policy)
    return engines.play(system, at_s, clock), clock.now()


class TestPlaying:
    @pytest.mark.parametrize(("at_s", "expected"), [((0.0, 5.0), [0.1, 0.1]), ((0.0, 0.01, 0.02), [0.1, 0.29, 0.28])])
    def test_a_batch_has_all_that_wait_and_ends_at_once_and_latencies_count_from_each_arrival(
        self, at_s: Sequence[float], expected: list[float]
    ) -> None:
        assert played("batches", [10] * len(at_s), at_s)[0] == pytest.approx(expected)

    @pytest.mark.parametrize(("policy", "expected"), [("batches", 0.1), ("batches by clusters", 0.05)])
    def test_cores_take_queries_or_clusters(self, policy: str, expected: float) -> None:
        assert played(policy, [10], [0.0], cores=2)[0] == pytest.approx([expected])

    def test_pieces_of_the_oldest_end_one_search_after_the_other_and_the_shortest_overtakes(self) -> None:
        oldest, _ = played("oldest first", [10, 10, 10], [0.0, 0.01, 0.02])
        assert oldest == pytest.approx([0.1, 0.19, 0.28], abs=0.015)
        (long, short), _ = played("shortest first", [80, 4], [0.0, 0.01])
        assert short < long / 2

    @pytest.mark.parametrize("policy", POLICIES)
    @pytest.mark.parametrize("cores", [1, 7])
    def test_no_work_is_lost_or_done_twice(self, policy: str, cores: int) -> None:
        nprobes = [1 + number % 50 for number in range(60)]
        latencies, end_s = played(policy, nprobes, [0.0] * 60, cores)
        assert end_s == pytest.approx(max(latencies))
        assert end_s >= sum(nprobes) * 10 * COSTS.code_s / cores


def test_the_papers_index_has_38_million_vectors() -> None:
    assert engines.paper_sizes().sum() == pytest.approx(38_000_000, rel=1e-3)


@pytest.mark.parametrize("clock", ["real", "virtual"])
def test_an_interrupted_cell_is_resumed_at_the_same_rate(
    clock: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured again, the rate would be that of a machine which is busy in another way."""
    suite = Suite.unlisted("mine", policies=["batches", "oldest first"], baseline="batches")
    cell = PartitionCell(clock=clock, vectors=1000, dimensions=8, requests=12)
    job = Job(suite, cell, 3, ("batches", "oldest first"), 12)
    rates = []

    def noted(rate: float, *rest: Any) -> Any:
        rates.append(rate)
        return poisson_arrivals(1000.0, *rest)

    monkeypatch.setattr(experiment, "poisson_arrivals", noted)
    with Store(tmp_path) as store, experiment.Partition(Options(), store, "session", silent) as partition:
        assert partition.measured_before(job) is None
        first = next(iter(partition.measure(job, lambda: None)))
        named = {"type": "partition", "session": "session", "suite": "mine", "cell": cell.fields, "seed": 3}
        store.append({**named, **first})
    with Store(tmp_path) as store, experiment.Partition(Options(), store, "session", silent) as partition:
        for name in ("search_seconds", "measure_costs", "piece_cpu_seconds"):
            monkeypatch.setattr(engines, name, lambda *_: pytest.fail("measured again"))
        (second,) = partition.measure(job.without(["batches"]), lambda: None)
    assert second["policy"] == "oldest first"
    assert second["facts"] == first["facts"]
    assert rates[0] == rates[1] == pytest.approx(1e3 * cell.load / first["facts"]["search_ms"])
