"""Runs of `ragorder bench` in figures: sums of what its records say of each request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ragorder.eval.running.measures import percentile

_DEFAULTS = {"order": "data", "waiting": 0, "batch": False, "max_wait": None}
_SUMMED = ("prompt_tokens", "cached_tokens", "reordered", "best_moved")


def runs_of(text: str) -> list[dict[str, Any]]:
    """The runs of a results.jsonl, in the order written."""
    lines = map(json.loads, text.splitlines())
    return [_figures(line) for line in lines if line["type"] == "run"]


def _figures(line: Mapping[str, Any]) -> dict[str, Any]:
    rows, cell, engine = line["rows"], line["cell"], line["engine"]
    served = [row for row, tokens in enumerate(rows["prompt_tokens"]) if tokens is not None]
    sums = {name: sum(rows[name][row] for row in served) for name in _SUMMED}
    predicted = rows["predicted_tokens"] or ()
    errors = [(predicted[row] - rows["cached_tokens"][row]) / engine["block_size"] for row in served if predicted]
    times = [rows["ttft_ms"][row] for row in served] if rows["ttft_ms"] else []
    return {
        **_DEFAULTS,
        **cell,
        **sums,
        "workload": cell.get("workload") or cell.get("corpus"),
        "policy": line["policy"],
        "seed": line["seed"],
        "engine": engine["name"],
        "capacity_tokens": engine["capacity_tokens"],
        "requests": len(rows["prompt_tokens"]),
        "failures": line["failures"],
        "cached_ratio": sums["cached_tokens"] / max(1, sums["prompt_tokens"]),
        "prediction_within_block": sum(abs(each) <= 1 for each in errors) / len(errors) if errors else None,
        "prediction_bias_blocks": sum(errors) / len(errors) if errors else None,
        "ttft_ms": {f"p{share}": percentile(times, share) for share in (50, 95)} if times else None,
        "tenths": line.get("facts", {}).get("tenths"),
    }
