"""Metrics that are compared between policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ragorder.eval.running.record import Record


@dataclass(frozen=True, slots=True)
class Metric:
    """A statistic of a column; with `of` its sum as a share of that column's."""

    name: str
    column: str
    unit: str
    of: str | None = None
    scale: float = 1
    statistic: Literal["mean", "p50", "p95", "p99"] = "mean"
    relative: bool = False
    better: Literal["higher", "lower"] = "higher"
    decimals: int = 1
    words: str = ""
    """In a sentence, if that is not the name."""

    @property
    def heading(self) -> str:
        return f"{self.name}, {self.unit}"

    @property
    def change_unit(self) -> str:
        return "%" if self.relative else "points" if self.unit.startswith("%") else self.unit

    def columns(self, run: Record) -> tuple[Any, Any] | None:
        """The figures of each request, and those of `of`; None without any."""
        values = run.column(self.column)
        if values is None:
            return None
        if self.of is None:
            return values * self.scale, None
        whole = run.column(self.of)
        return None if whole is None else (values * self.scale, whole)

    def value(self, runs: Sequence[Record]) -> float | None:
        import numpy as np

        found = [columns for run in runs if (columns := self.columns(run)) is not None]
        if not found:
            return None
        values = np.concatenate([values for values, _ in found])
        if self.of is not None:
            whole = np.concatenate([whole for _, whole in found])
            known = np.isfinite(values) & np.isfinite(whole)
            return float(values[known].sum() / max(1.0, whole[known].sum()))
        values = values[np.isfinite(values)]
        if self.statistic == "mean":
            return float(values.mean())
        return float(np.quantile(values, float(self.statistic.removeprefix("p")) / 100))


CACHED = Metric("cached tokens", "cached_tokens", "% of prompt tokens", of="prompt_tokens", scale=100)
TTFT_P50 = Metric(
    "TTFT p50",
    "ttft_ms",
    "ms",
    statistic="p50",
    relative=True,
    better="lower",
    words="median time to the first token",
)
TTFT_P95 = Metric("TTFT p95", "ttft_ms", "ms", statistic="p95", relative=True, better="lower")
TTFT_P99 = Metric("TTFT p99", "ttft_ms", "ms", statistic="p99", relative=True, better="lower")
TTFT_MEAN = Metric("TTFT mean", "ttft_ms", "ms", relative=True, better="lower", words="mean time to the first token")
TBT_P50 = Metric("TBT p50", "tbt_ms", "ms", statistic="p50", relative=True, better="lower")
TBT_P99 = Metric("TBT p99", "tbt_ms", "ms", statistic="p99", relative=True, better="lower")
DOCUMENTS = Metric("whole documents cached", "cached_documents", "mean", decimals=2)
REORDERED = Metric("prompts reordered", "reordered", "%", scale=100, better="lower")
REORDERED_COLD = Metric(
    "reordered with nothing cached", "reordered_cold", "% of all prompts", scale=100, better="lower"
)
BEST_MOVED = Metric("best document not first", "best_moved", "% of all prompts", scale=100, better="lower")
SHARE_MOVED = Metric("documents moved", "moved_share", "% of documents", scale=100, better="lower")
PLACES = Metric("moved by", "displacement", "places, mean of all documents", better="lower", decimals=2)
