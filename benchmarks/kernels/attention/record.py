"""The record of the attention kernel."""

from __future__ import annotations

from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ragorder.benchmarks.kernels.attention.cells import TOLERANCE, AttentionCell
from ragorder.eval.running.record import Record

__all__ = ["AttentionRecord"]


class AttentionRecord(Record):
    """One contender on one problem. Column `ms` is empty without a GPU, or for a wrong result."""

    called: ClassVar[str] = "a measurement of attention"
    is_run: ClassVar[bool] = False

    type: Literal["attention"] = "attention"
    cell: dict[str, Any]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not (
            isinstance(self.rows.get("ms"), list) and self.setting and self.facts.keys() >= {"error", "flops", "bytes"}
        ):
            raise ValueError("facts or times are missing")
        return self

    @property
    def setting(self) -> AttentionCell:
        return AttentionCell.model_validate(self.cell)

    @property
    def right(self) -> bool:
        return float(self.facts["error"]) <= TOLERANCE[self.setting.dtype]

    @property
    def median_ms(self) -> float | None:
        return median(self.rows["ms"]) if self.rows["ms"] else None
