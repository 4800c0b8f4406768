"""The example of benchmarks/README.md is a measurement, and reports are what the committed results say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.claims import tables_of
from support.results import RESULTS, render, titles

README = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
SCRIPT = """
import sys
from ragorder import benchmarks
from ragorder.cli import main
benchmarks.__path__.append(sys.argv[1])
run = ["eval", "run", "sorting", "--seeds", "0,1", "--set", "length=1000", "-o", sys.argv[2]]
main(run, standalone_mode=False)
main(["report", sys.argv[2], "--markdown", "-"], standalone_mode=False)
"""


def test_it_is_found_runs_and_reports(tmp_path: Path, python: Callable[..., Any]) -> None:
    for language, name in (("python", "sorting.py"), ("toml", "sorting.toml")):
        found = re.search(f"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
        (tmp_path / name).write_text(found[1], "utf-8")
    done = python("-c", SCRIPT, tmp_path, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "### Sorting 1,000 numbers" in done.stdout
    assert "| numbers are | ms | of random ones |" in done.stdout
    assert re.search(r"^\| sorted \| .* \|$", done.stdout, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", titles())
def test_a_committed_report_is_what_its_results_say(name: str) -> None:
    pytest.importorskip("scipy")
    assert render(RESULTS / name, titles()[name]) == (RESULTS / name / "report.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "suite", "column", "least", "most"),
    [
        ("replicas", "replicas", "of best, %", 90, 1e9),
        ("replicas", "replicas", "largest / mean work", 0, 1.5),
        ("replicas", "shared-orders", "of one process, %", 90, 1e9),
        ("sharded-plan", "sharded-plan", "of one plan, %", 97, 1e9),
        ("clouds", "clouds", "worst 1,000 requests, %", 0, 103),
    ],
)
def test_a_report_marks_what_reaches_its_goal(data: str, suite: str, column: str, least: float, most: float) -> None:
    tables = tables_of(f"results/{data}", suite)
    entries = [row[list(table.headings).index(column)] for table in tables for row in table.rows]
    marked = [(float(each.text), each.tone) for each in entries if each.tone]
    assert 0 < len(marked) < len(entries)
    assert [(value, "good" if least <= value <= most else "bad") for value, _ in marked] == marked
