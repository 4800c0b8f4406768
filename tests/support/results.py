"""The results that a run of the harness wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["result_lines"]


def result_lines(folder: Path, type: str | None = None) -> list[dict[str, Any]]:
    """The lines of `results.jsonl`, of one type or all of them."""
    found = [json.loads(line) for line in (folder / "results.jsonl").read_text("utf-8").splitlines()]
    return [line for line in found if type is None or line["type"] == type]
