"""Comparison of the answers in a results file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ragorder.eval.experiments.quality.compare import summarise
from ragorder.eval.running.progress import Progress
from ragorder.jsonl import JSONLines

__all__ = ["judge_previous"]

Line = dict[str, Any]


def judge_previous(
    path: Path, suite: str, session: str | None, progress: Progress | None = None
) -> tuple[list[Line], list[Line]]:
    """The "quality" lines of cells without a verdict on all of them, and the checks of `summarise` as lines of
    `session`. Raises OSError; ImportError without scipy."""
    cells: dict[str, list[Line]] = {}
    unjudged: dict[str, None] = {}
    # Most lines are of other types, and long.
    for _, line in JSONLines(path, max_line_bytes=None).objects(containing=b'"quality'):
        cell = json.dumps([line.get(field) for field in ("cell", "seed", "dry_run")], sort_keys=True)
        if line.get("suite") != suite:
            continue
        if line.get("type") == "quality":
            cells.setdefault(cell, []).append(line)
            unjudged[cell] = None
        elif line.get("name") == "quality-verdict":
            unjudged.pop(cell, None)
    lines = [line for cell in unjudged for line in cells[cell]]
    checks = summarise(lines, progress) if lines else []
    return lines, [{**check, "session": session} for check in checks]
