"""Processes that ask one simulated engine and share their orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.suites import page_of, run_suites

from ragorder.benchmarks.fleet.sharing import SharingCell, serve
from ragorder.eval.data.trace import TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import make_workload


@pytest.fixture(scope="module")
def requests() -> list[TraceRequest]:
    return list(trace_of_workload(make_workload("mix8", 0, requests=600), 600).requests)


def cell(**fields: Any) -> SharingCell:
    return SharingCell.read({"workload": "mix8", **fields}, "here")


def cached(rows: dict[str, list[int]]) -> float:
    return sum(rows["cached_tokens"]) / sum(rows["prompt_tokens"])


class TestServing:
    def test_one_process_has_nothing_to_share(self, requests: list[TraceRequest]) -> None:
        one = cell(processes=1)
        assert serve(requests, one, 0, 100, shared=True) == serve(requests, one, 0, 100, shared=False)

    def test_shared_orders_are_nearly_those_of_one_process(self, requests: list[TraceRequest]) -> None:
        one = cached(serve(requests, cell(processes=1), 0, 100, shared=False))
        for processes in (4, 16):
            many = cell(processes=processes)
            own, shared = (cached(serve(requests, many, 0, 100, shared=shared)) for shared in (False, True))
            assert shared >= 0.9 * one > own

    def test_late_ones_are_worth_less(self, requests: list[TraceRequest]) -> None:
        found = [cached(serve(requests, cell(late=late), 0, 100, shared=True)) for late in (0, 64)]
        assert found[0] > found[1]

    def test_is_the_same_each_time(self, requests: list[TraceRequest]) -> None:
        rows = [serve(requests[:200], cell(), 1, 10, shared=True) for _ in range(2)]
        assert rows[0] == rows[1]
        assert {len(column) for column in rows[0].values()} == {190}


class TestSuite:
    def test_runs_and_reports(self, tmp_path: Path) -> None:
        run_suites(tmp_path, "shared-orders", "--reduced", "--limit", 60, "--seeds", 0)
        page = page_of(tmp_path)
        rows = [line for line in page.splitlines() if "orders |" in line and line[:3] in ("| 1", "| 4")]
        # One process: once either way. Four: their own once, shared ones with each delay.
        assert len(rows) == 2 + 1 + 3
        assert "32 requests later" in page
