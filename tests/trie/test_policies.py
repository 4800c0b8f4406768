"""What the ordering policies save on the simulated engine, and that engine and workloads are those of the notes.

Cached tokens are exact and deterministic: a figure that falls is a change of the algorithm and no noise.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from statistics import fmean

import pytest
from support.benched import run_bench
from support.rings import grid

from ragorder.eval.data.workloads import WORKLOADS, make_workload
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.running.specs import Bench

SHARED = Path(__file__).resolve().parents[3] / "shared"
SEEDS = (0, 1)

FULL, SMALL = Capacity(tokens=100_000), Capacity(percent=5)

ROWS = {
    "paper": ("paper", FULL),
    "paper-shuf": ("paper-shuf", FULL),
    "ov0.4": ("ov0.4", FULL),
    "ov0.8": ("ov0.8", FULL),
    "mix8": ("mix8", FULL),
    "zipf10": ("zipf10", FULL),
    "geo": ("geo", FULL),
    "mix8-5%": ("mix8", SMALL),
    "geo-5%": ("geo", SMALL),
}
RANK = dict(zip(ROWS, (69.3, 41.5, 37.7, 51.8, 43.2, 22.3, 37.0, 22.3, 14.7), strict=True))
FREQUENCY = dict(zip(ROWS, (67.6, 40.3, 36.5, 51.2, 42.5, 25.9, 36.8, 22.1, 15.1), strict=True))
WITH_QUEUE = {"mix8": 48.0, "mix8-5%": 33.0}
CHECKED = grid(list(ROWS), 2)

DIGESTS = {
    "paper": ("aba0f33df39005149b14a1512e90a4bc", "736f654b6ff4188c147aafdd85f662a1"),
    "paper-shuf": ("e5843c774a6f4508e8d47768856a4bdb", "f8d1d86555b7fc0bdf5190f41790dc7d"),
    "ov0.0": ("2a3ed4afee3d78ae6d6b5980e48bd77e", "deacb1a99f97f34096b6d0307a0894cc"),
    "ov0.2": ("2a3ed4afee3d78ae6d6b5980e48bd77e", "deacb1a99f97f34096b6d0307a0894cc"),
    "ov0.4": ("8971e36f3ae8ea87c939913f220cec3e", "6d709cb73d96767a688a85f8517ceb0b"),
    "ov0.6": ("e5843c774a6f4508e8d47768856a4bdb", "f8d1d86555b7fc0bdf5190f41790dc7d"),
    "ov0.8": ("180d4011b403df02443e46ec150367cf", "90413d53f52a12b9dd22e92059b7701e"),
    "mix8": ("be5c37c32847346cf00974cf14d7e012", "7e542fa193493754cb7c83772f56acf1"),
    "zipf10": ("80f22f6b685a641c71ee9ac5e3657bb7", "b281dc58a055a132e263abf3eb2c5c32"),
    "geo": ("897b04267a26411a6ee5398dd8edfcea", "e57d747605dfcaee9fcd455651615b8c"),
}
"""sha256 (its first half) of the rankings as JSON, for seeds 0 and 1."""

CORPORA = [("covidqa", 5, 45.0), ("covidqa", 10, 43.0), ("bing_covid_cord", 5, 88.5), ("nqopen", 5, 42.0)]


def cached_percent(bench: Bench) -> dict[str, float]:
    """Mean over the seeds of the cached share of all prompt tokens, for each policy."""
    shares: dict[str, list[float]] = {policy: [] for policy in bench.policies}
    for result in run_bench(bench):
        shares[result.policy].append(100 * result.cached_tokens / result.prompt_tokens)
    assert all(len(values) == len(bench.seeds) for values in shares.values())
    return {policy: fmean(values) for policy, values in shares.items()}


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, str], float]:
    """Cached tokens in percent by (policy, row of the table); "waiting" is free with eight requests waiting."""
    found = {}
    for row in dict.fromkeys([*CHECKED, *WITH_QUEUE]):
        workload, capacity = ROWS[row]
        bench = Bench(workloads=(workload,), policies=("prefix", "free", "oracle"), capacity=capacity, seeds=SEEDS)
        for policy, percent in cached_percent(bench).items():
            found[policy, row] = percent
    for row in WITH_QUEUE:
        workload, capacity = ROWS[row]
        bench = Bench(workloads=(workload,), policies=("free",), capacity=capacity, seeds=SEEDS, waiting=8)
        found["waiting", row] = cached_percent(bench)["free"]
    return found


@pytest.mark.parametrize("row", CHECKED)
def test_policies_save_what_the_notes_and_an_oracle_that_reads_the_block_table_say(
    figures: dict[tuple[str, str], float], row: str
) -> None:
    assert figures["prefix", row] >= RANK[row] - 0.7
    assert figures["prefix", row] == pytest.approx(figures["oracle", row], abs=0.5)
    assert figures["free", row] >= max(RANK[row], FREQUENCY[row]) - 1.0


@pytest.mark.parametrize("row", WITH_QUEUE)
def test_eight_waiting_requests_are_a_large_gain(figures: dict[tuple[str, str], float], row: str) -> None:
    assert figures["waiting", row] >= WITH_QUEUE[row]
    assert figures["waiting", row] >= figures["free", row] + 5


def test_the_same_run_gives_the_same_tokens() -> None:
    bench = Bench(workloads=("mix8",), policies=("prefix", "free", "random"), limit=150, waiting=4)
    one, other = ([(run.policy, run.cached_tokens, run.displacement_mean) for run in run_bench(bench)] for _ in "ab")
    assert one == other


def test_predicts_cached_tokens_to_within_a_block() -> None:
    results = run_bench(
        Bench(workloads=("mix8", "zipf10"), policies=("prefix", "free", "frequency"), capacity=SMALL, limit=300)
    )
    assert [result.prediction_within_block for result in results] == [1.0] * 6


def test_without_prefix_cache_nothing_is_cached_and_retrieval_order_moves_nothing() -> None:
    none, retrieval = run_bench(Bench(workloads=("paper-shuf",), policies=("none", "retrieval"), limit=100))
    assert (none.cached_tokens, retrieval.displacement_mean) == (0, 0)
    assert retrieval.cached_tokens > 0


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="the real corpora lie outside the project")
@pytest.mark.parametrize(("corpus", "top_k", "percent"), CORPORA)
def test_batches_of_real_questions(corpus: str, top_k: int, percent: float) -> None:
    bench = Bench(
        corpora=(str(SHARED / "data" / corpus),),
        policies=("prefix",),
        top_k=top_k,
        order="random",
        capacity=Capacity(tokens=32_768),
        batch=True,
    )
    assert cached_percent(bench)["prefix"] >= percent


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_draw_what_they_always_drew(name: str, seed: int) -> None:
    rankings = make_workload(name, seed).rankings
    assert hashlib.sha256(json.dumps(rankings).encode()).hexdigest().startswith(DIGESTS[name][seed])
