"""Staged searches against plain ones: their times, and when what they find is final."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.results import result_lines
from support.suites import page_of, run_suites

faiss = pytest.importorskip("faiss")
np = pytest.importorskip("numpy")

from ragorder.benchmarks.common.vectors import build_index, clustered
from ragorder.benchmarks.hedra.staging import final_shares, time_stages
from ragorder.pipelining import Stage, StagedIVF


class Scripted:
    """A staged search whose stages are given."""

    def __init__(self, *stages: list[list[int]]) -> None:
        self.stages = stages

    def search(self, queries: Any, k: int) -> Iterator[Stage]:
        for number, ids in enumerate(self.stages, 1):
            yield Stage(number, len(self.stages), np.array(ids), np.zeros((len(ids), k), np.float32))


def test_a_stage_is_final_for_the_questions_whose_best_no_longer_change() -> None:
    staged = Scripted([[1, 2], [3, 4], [5, 6]], [[1, 9], [3, 4], [7, 6]], [[1, 2], [3, 4], [5, 6]])
    found = final_shares(staged, np.zeros((3, 1), np.float32), depths=(1, 2))
    assert found == {1: [2 / 3, 2 / 3, 1], 2: [1 / 3, 1 / 3, 1]}


def test_what_is_final_depends_on_the_order_of_the_best() -> None:
    staged = Scripted([[1, 2]], [[2, 1]])
    assert final_shares(staged, np.zeros((1, 1), np.float32), depths=(2,)) == {2: [0, 1]}


def test_stages_are_counted_and_both_searches_timed() -> None:
    index = build_index(clustered(2000, 16, clusters=60, seed=0), 0.2)
    stages, rows = time_stages(index.search, StagedIVF(index, 4), clustered(20, 16, clusters=60, seed=1), 5)
    assert stages == 4
    assert len(rows["plain_ms"]) == len(rows["added_ms"]) == 20
    assert min(rows["plain_ms"]) > 0


def test_the_suite_measures_each_search(tmp_path: Path) -> None:
    run_suites(tmp_path, "staged-search", vectors=400, dimensions=8, queries=3)
    searches = [line["facts"]["search"] for line in result_lines(tmp_path, "staging")]
    assert len(searches) == 10
    assert searches[:2] == ["IVFFlat, 10 of 80 clusters, equal", "IVFFlat, 10 of 80 clusters, geometric"]
    assert "What stages add to a search: 400 random vectors" in page_of(tmp_path)
