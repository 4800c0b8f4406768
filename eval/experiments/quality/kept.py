"""Quality results of earlier sessions in a results file, and their comparison."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ragorder.eval.experiments.quality.compare import summarise
from ragorder.eval.running.progress import Progress

__all__ = ["judge_kept"]

Line = dict[str, Any]


def judge_kept(path: Path, suite: str, session: str, progress: Progress | None = None) -> tuple[list[Line], list[Line]]:
    """The lines of type "quality" of those cells of a suite in which an order was asked since the last verdict, or
    which have none because a session was interrupted; and what `summarise` says of them, as lines of this `session`.

    Torn lines are passed over. Raises OSError, ImportError without scipy.
    """
    cells: dict[str, list[Line]] = {}
    unjudged: dict[str, None] = {}
    for line in _lines(path):
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


def _lines(path: Path) -> Iterator[Line]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            # Most lines are of other types, and long.
            if '"quality' not in text:
                continue
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield line
