"""The cell and the record of searches on two tiers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["HybridCell", "HybridRecord"]


class HybridCell(SuiteCell):
    """Searches of an index in a file, of which memory holds the share `held`.

    Without a `corpus`: random vectors, asked for so that a fifth of the clusters has the share `skew` of the work
    (HedraRAG Figure 8: 69 %).
    """

    corpus: str | None = None
    held: float = Field(0.2, gt=0, lt=1)
    skew: float = Field(0.69, gt=0.2, lt=1)
    vectors: int = Field(100_000, ge=1000)
    dimensions: int = Field(64, ge=1)
    nprobe: float = Field(0.0625, gt=0, le=1)
    requests: int = Field(800, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None


class HybridRecord(Record):
    """`rows["latency_ms"]`: of each search after the first `warmup`, which the tiers learn from."""

    called: ClassVar[str] = "a measurement of an index in two tiers"
    is_run: ClassVar[bool] = False
    facts_needed: ClassVar[tuple[str, ...]] = ("skew", "hit_share")

    type: Literal["hybrid-index"] = "hybrid-index"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_ms",)
