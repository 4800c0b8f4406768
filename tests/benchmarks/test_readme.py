"""The example of benchmarks/README.md is a measurement."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

README = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
SCRIPT = """
import sys
from ragorder import benchmarks
from ragorder.cli import main
benchmarks.__path__.append(sys.argv[1])
run = ["eval", "run", "sorting", "--seeds", "0,1", "--set", "length=1000", "-o", sys.argv[2]]
main(run, standalone_mode=False)
main(["eval", "report", sys.argv[2], "--md", "-"], standalone_mode=False)
"""


def test_it_is_found_runs_and_reports(tmp_path: Path, python: Callable[..., Any]) -> None:
    for language, name in (("python", "sorting.py"), ("toml", "sorting.toml")):
        found = re.search(f"```{language}\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
        assert found is not None
        (tmp_path / name).write_text(found[1], "utf-8")
    done = python("-c", SCRIPT, tmp_path, tmp_path / "results")
    assert done.returncode == 0, done.stderr
    assert "### Sorting 1,000 numbers" in done.stdout
    assert "| numbers are | ms | of random ones |" in done.stdout
    assert re.search(r"^\| sorted \| .* \|$", done.stdout, re.MULTILINE)
