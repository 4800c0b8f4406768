"""Figures and parameters in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ragorder.eval.report.statistics import PairedDifference

THIN = "\u00a0"  # keeps a number and its unit on one line
NO_INTERVAL = "too few requests for an interval"
_POLICIES = {
    "none": "no cache",
    "retrieval": "retrieval order",
    "reversed": "rank reversed",
    "sorted": "sorted by id",
    "greedy": "RAGCache++ (greedy)",
    "earned": "ragorder (earned)",
    "free": "ragorder (free)",
    "contextpilot": "ContextPilot",
}
_PARAMETERS = {
    "capacity_tokens": "cache",
    "capacity": "cache",
    "concurrency": "in flight",
    "top_k": "top",
    "order": "order",
    "waiting": "waiting",
    "workload": "",
    "corpus": "",
    "dataset": "",
    "layout": "",
    "model": "",
    "engine": "",
}

_AXES = {
    "capacity_tokens": "cache, tokens",
    "concurrency": "requests in flight",
    "waiting": "requests that wait",
    "top_k": "documents a request",
}
_SWITCHES = {"batch": ("one by one", "planned as a batch")}


def format_number(value: float | None, decimals: int = 1) -> str:
    """With thousands set apart; a dash for None."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:,.{decimals}f}".replace("-", "−")


def short_number(value: float) -> str:
    """Of three digits, in thousands or millions."""
    unit, size = next((each for each in (("M", 1e6), ("k", 1e3)) if abs(value) >= each[1]), ("", 1.0))
    return f"{value / size:.3g}{unit}"


def signed(value: float, decimals: int = 1) -> str:
    shown = format_number(value, decimals)
    return shown if value < 0 or float(f"{value:.{decimals}f}") == 0 else f"+{shown}"


def spread_words(values: Sequence[float]) -> str:
    """Return the smallest change and the largest, or the one that all have."""
    return " to ".join(dict.fromkeys(signed(end) for end in (min(values), max(values))))


def change_words(comparison: PairedDifference, decimals: int = 1) -> str:
    """A difference and its interval, in % of the baseline if it is relative."""
    scale = 100 if comparison.relative else 1
    unit = f"{THIN}%" if comparison.relative else ""
    shown = f"{signed(scale * comparison.difference, decimals)}{unit}"
    if not comparison.known:
        return f"{shown} [{NO_INTERVAL}]"
    low, high = (signed(scale * end, decimals) for end in (comparison.low, comparison.high))
    return f"{shown} [{low}, {high}]"


def interval_words(
    comparison: PairedDifference, decimals: int = 1, scale: Callable[[float], float] = lambda difference: difference
) -> str:
    if not comparison.known:
        return NO_INTERVAL
    low, high = sorted(map(scale, (comparison.low, comparison.high)))
    return f"[{format_number(low, decimals)}, {format_number(high, decimals)}]"


def verdict_words(comparison: PairedDifference) -> str:
    return comparison.verdict if comparison.known else "too few requests"


def range_words(numbers: Iterable[float], decimals: int = 0) -> str:
    low, high = min(found := list(numbers)), max(found)
    return " to ".join(dict.fromkeys(format_number(each, decimals) for each in (low, high)))


def served_words(requests: Iterable[int], warmup: Iterable[int], each: str = "a seed") -> str:
    return f"{range_words(requests)} requests {each} after {range_words(warmup)} of warm-up"


def seeds_by_row(rows: Sequence[Iterable[int]]) -> tuple[list[str], str]:
    """Words on the seeds of each row, empty if all rows have the same; and those for the table's note."""
    seeds = [tuple(sorted(set(row))) for row in rows]
    words = [f"seed{'s' * (len(row) > 1)} {', '.join(map(str, row))}" for row in seeds]
    if len(set(seeds)) > 1:
        return words, "rows differ in their seeds, which stand in each"
    return [""] * len(seeds), words[0] if words else ""


def capital(words: str) -> str:
    """As a sentence begins; a name keeps its small letter."""
    return words if words.startswith("ragorder") else f"{words[:1].upper()}{words[1:]}"


def axis_words(name: str) -> str:
    return _AXES.get(name, name.replace("_", " "))


def policy_words(policy: str) -> str:
    return _POLICIES.get(policy, policy)


def cell_words(cell: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, (_parameter(name, value) for name, value in cell.items())))


def _parameter(name: str, value: Any) -> str:
    if name in _SWITCHES and isinstance(value, bool):
        return _SWITCHES[name][value]
    if name in ("guards", "residency") and value == "none":
        return f"no {name}"
    shown = value_words(name, value)
    if name == "guards":
        return shown
    if name == "order":
        return f"{shown} order" if shown else ""
    if name in ("waiting", "concurrency"):
        return f"{shown} {_PARAMETERS[name]}" if value is not None else ""
    return f"{_PARAMETERS.get(name, name.replace('_', ' '))} {shown}".strip() if shown else ""


def value_words(name: str, value: Any) -> str:
    """Nothing for a value left to the engine."""
    if value is None:
        return "unlimited" if name.startswith("capacity") else ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "tokens" in name:
        return f"{value:,} tokens"
    if isinstance(value, Mapping):
        return ", ".join(f"{inner} {each}" for inner, each in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value).replace("=", " ").replace("_", " ") if name == "guards" else str(value)


def value_on_axis(name: str, value: Any) -> str:
    large = isinstance(value, int | float) and value >= 1_000
    return short_number(value) if large else value_words(name, value)
