"""An index that is refined from disk: what is read, what is found, and the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.suites import page_of, run_suites

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder.benchmarks.common.vectors import clustered
from ragorder.benchmarks.doll.disk_index import POLICIES, DiskIndexCell, measure, refine

D = 32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    vectors, queries = (clustered(count, D, clusters=60, seed=seed) for seed, count in ((0, 3000), (1, 40)))
    cell = DiskIndexCell(vectors=3000, dimensions=D, nprobe=0.5, factor=20)
    folder = tmp_path_factory.mktemp("vectors")
    return {policy: measure(policy, vectors, queries, cell, folder) for policy in POLICIES}


def test_codes_take_a_part_of_the_memory_and_find_less(found: Any) -> None:
    whole = 3000 * D * 4
    codes, recall = found["codes"]
    assert codes.memory_bytes == 3000 * (D // 4 + 8)
    assert codes.read_bytes == 0
    assert recall < found["partitions"][1]
    assert found["partitions"][0].read_bytes == whole + 3000 * 8
    assert found["partitions"][0].memory_bytes == pytest.approx((whole + 3000 * 8) / 32, abs=1)


def test_refining_finds_more_and_reads_a_part(found: Any) -> None:
    refined, recall = found["codes refined"]
    assert recall > found["codes"][1] + 0.1
    assert refined.memory_bytes == found["codes"][0].memory_bytes
    assert 0 < refined.read_bytes <= 3000 * D * 4 + 4096


def test_refining_gives_the_best_of_the_candidates_in_order_and_reads_each_page_once() -> None:
    vectors = np.eye(8, dtype=np.float32)
    queries = np.array([[0, 1, 2, 3, 0, 0, 0, 0], [9, 0, 0, 0, 0, 0, 0, 1]], np.float32)
    refined = refine(vectors, queries, np.array([[1, 3, 2, 0], [7, 0, -1, -1]]), 3)
    assert refined.ids.tolist() == [[3, 2, 1], [0, 7, -1]]
    assert refined.read_bytes == 4096
    vectors = np.zeros((64, 1024), np.float32)
    queries = np.ones((2, 1024), np.float32)
    assert refine(vectors, queries, np.array([[0, 1], [1, 2]]), 1).read_bytes == 3 * 4096


def test_the_suite_runs(tmp_path: Path) -> None:
    run_suites(tmp_path, "doll-disk-index", "--reduced")
    assert "A batch of 8 searches: 2,000 random vectors of 16, top 5" in page_of(tmp_path)
