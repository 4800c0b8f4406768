"""Batches planned in shards, as the suite measures them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragorder.benchmarks.fleet.sharded_plan import PlanFailedError, draw, run_plan, write_requests


def test_requests_of_topics_share_documents_and_are_the_same_for_a_seed() -> None:
    rankings = list(draw("topics", 500, 3))
    assert rankings == list(draw("topics", 500, 3)) != list(draw("topics", 500, 4))
    assert {len(set(ranking)) for ranking in rankings} == {8}
    assert len({document for ranking in rankings for document in ranking}) < 0.3 * 8 * 500
    # Others are workloads.
    assert {len(ranking) for ranking in draw("mix8", 100, 0)} == {5}


class TestRun:
    def test_tells_time_and_memory_of_all_processes(self, tmp_path: Path) -> None:
        write_requests(tmp_path / "requests.jsonl", draw("topics", 200, 0))
        options = ("--shards", "2", "--workers", "2")
        manifest, facts = run_plan(tmp_path / "requests.jsonl", tmp_path / "plan", *options)
        assert manifest["requests"] == 200
        # Three interpreters.
        assert facts["core_s"] > 0 and facts["peak_bytes"] > 3 * 10_000_000
        assert 1 <= facts["largest"] < 2

    def test_a_failure_is_what_the_command_said(self, tmp_path: Path) -> None:
        (tmp_path / "requests.jsonl").write_text("oops\n", "utf-8")
        with pytest.raises(PlanFailedError, match="not JSON"):
            run_plan(tmp_path / "requests.jsonl", tmp_path / "plan")
