"""The workflow server's own time: what is counted, and what the report says."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy")

from click.testing import CliRunner

from ragorder.benchmarks.hedra.wavefront import WavefrontCell, measure
from ragorder.cli import main


class TestMeasuring:
    async def test_counts_the_pieces_of_all_requests(self) -> None:
        """Of three rounds each: a search, a generation and a step."""
        cell = WavefrontCell.read({"requests": 6, "in_flight": 3, "stages": 8, "tokens": 3}, "here")
        _, plain = await measure(cell, transformed=False)
        assert (plain["pieces"], plain["speculative"]) == (6 * 9, 0)
        _, all_ = await measure(cell, transformed=True)
        assert all_["pieces"] == 6 * 9 + all_["speculative"] and all_["speculative"] > 0


class TestSuite:
    def test_runs_and_reports(self, tmp_path: Path) -> None:
        asked = ["eval", "run", "hedra-overhead", "--limit", "3", "--set", "in_flight=2", "--set", "repeats=1"]
        result = CliRunner().invoke(main, [*asked, "--output", str(tmp_path)])
        assert result.exit_code == 0, result.output
        report = CliRunner().invoke(main, ["eval", "report", str(tmp_path), "--md", "-"])
        assert report.exit_code == 0, report.output
        rows = [line for line in report.output.splitlines() if line.startswith("| 2 |")]
        assert [row.split("|")[2].strip() for row in rows] == ["stage by stage", "all"]


def test_a_client_of_an_engine_elsewhere(tmp_path: Path) -> None:
    """HyDE's two generations are asked for whole where nothing reads their tokens."""
    pytest.importorskip("openai")
    sizes = ["workflow=hyde", "requests=2", "tokens=5", "repeats=1"]
    asked = ["eval", "run", "hedra-client", "--output", str(tmp_path), *(f"--set={each}" for each in sizes)]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    report = CliRunner().invoke(main, ["eval", "report", str(tmp_path), "--md", "-"])
    rows = [[each.strip() for each in line.split("|")] for line in report.output.splitlines() if "| hyde |" in line]
    sent = {row[2]: (float(row[6]), float(row[7])) for row in rows}
    assert sent["plain client"] == sent["stage by stage"] == (2.0, 0.0)
    assert sent["streaming client"] == (2.0, 2.0)
