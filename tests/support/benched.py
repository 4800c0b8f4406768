"""Runs of a benchmark in figures: sums of what its records say of each request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from statistics import fmean
from types import SimpleNamespace
from typing import Any

from ragorder.eval.running.bench import run_traces
from ragorder.eval.running.measures import percentile
from ragorder.eval.running.runner import Run
from ragorder.eval.running.specs import Bench

_DEFAULTS = {"order": "data", "waiting": 0, "batch": False, "max_wait": None}
_SUMMED = ("prompt_tokens", "cached_tokens", "reordered", "displacement")


def runs_of(text: str) -> list[dict[str, Any]]:
    """The runs of a results.jsonl, in the order written."""
    lines = map(json.loads, text.splitlines())
    return [_figures(line) for line in lines if line["type"] == "run"]


def run_bench(bench: Bench) -> list[Any]:
    """Every policy on every trace and seed."""
    return [result_of(run) for runs in run_traces(bench) for run in runs]


def result_of(run: Run) -> Any:
    """A served run, its figures as attributes."""
    key = {"cell": {"workload": run.trace.name}, "policy": run.policy_name, "seed": run.seed}
    return SimpleNamespace(**_figures(key | run.fields(None)))


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
        "cached_ratio": round(sums["cached_tokens"] / max(1, sums["prompt_tokens"]), 6),
        "displacement_mean": round(sums["displacement"] / max(1, len(served)), 4),
        "prediction_within_block": fmean(abs(each) <= 1 for each in errors) if errors else None,
        "prediction_error_blocks_mean": fmean(map(abs, errors)) if errors else None,
        "prediction_bias_blocks": fmean(errors) if errors else None,
        "ttft_ms": {f"p{share}": percentile(times, share) for share in (50, 95)} if times else None,
        "tenths": line.get("facts", {}).get("tenths"),
    }
