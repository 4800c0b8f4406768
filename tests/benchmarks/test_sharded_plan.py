"""Batches planned in shards, as the suite measures them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from ragorder.benchmarks.fleet.sharded_plan import PlanFailedError, ShardedPlan, draw, run_plan, write_requests
from ragorder.cli import main
from ragorder.eval.report.declared import tables_of
from ragorder.eval.running.reading import Results
from ragorder.eval.running.record import Record
from ragorder.eval.running.suite import Suite


class TestRequests:
    def test_topics_share_documents_and_are_the_same_for_a_seed(self) -> None:
        rankings = list(draw("topics", 500, 3))
        assert rankings == list(draw("topics", 500, 3)) != list(draw("topics", 500, 4))
        assert {len(set(ranking)) for ranking in rankings} == {8}
        assert len({document for ranking in rankings for document in ranking}) < 0.3 * 8 * 500

    def test_others_are_workloads(self) -> None:
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


class TestSuite:
    def test_runs_and_reports(self, tmp_path: Path) -> None:
        asked = ["eval", "run", "sharded-plan", "--reduced", "--seeds", "0", "--output", str(tmp_path)]
        result = CliRunner().invoke(main, asked)
        assert result.exit_code == 0, result.output
        report = CliRunner().invoke(main, ["eval", "report", str(tmp_path), "--md", "-"])
        assert report.exit_code == 0, report.output
        rows = [line for line in report.output.splitlines() if line.startswith("| topics | 300 |")]
        assert [row.split(" | ")[2] for row in rows] == ["one plan", "4"]

    def test_the_report_compares_with_one_plan(self) -> None:
        def record(policy: str, saved: int) -> Record:
            facts = {"requests": 100, "core_s": 0.5, "peak_bytes": 1 << 30, "largest": 1.25}
            rows = {"tokens": [1000], "saved_tokens": [saved]}
            return ShardedPlan.record(suite="mine", policy=policy, cell={"shards": 8}, rows=rows, facts=facts)

        lines = [record("one plan", 500), record("shards", 480)]
        (table,) = tables_of(ShardedPlan, Suite.unlisted("mine"), Results(Path(), records=lines))
        assert [[entry.text for entry in row] for row in table.rows] == [
            ["topics", "100", "one plan", "50.0", "–", "1.25", "5,000", "1.00"],
            ["topics", "100", "8", "48.0", "96.0", "1.25", "5,000", "1.00"],
        ]
        assert table.rows[1][4].tone == "bad"
