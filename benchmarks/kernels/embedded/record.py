"""The record of the embedded engine."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.kernels.embedded.cells import EmbeddedCell
from ragorder.eval.running.record import Record

__all__ = ["EmbeddedRecord"]

_COLUMNS = ("wall_ms", "cpu_ms", "device", "host", "disk")
_SERVED = ("prompt_tokens", "hits", "retrieved")


class EmbeddedRecord(Record):
    """One arm: times and cached tokens of each repetition or request. `facts`: the `profile` that PGDSF had."""

    called: ClassVar[str] = "a measurement of the embedded engine"

    type: Literal["embedded"] = "embedded"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any] = Field(default_factory=dict)

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return _COLUMNS + (_SERVED if self.setting.measure == "serving" else ())

    @property
    def setting(self) -> EmbeddedCell:
        return EmbeddedCell.model_validate(self.cell)

    @property
    def requests(self) -> int:
        return len(self.figures("wall_ms"))

    def figures(self, name: str) -> list[float]:
        """The figures after the warm-up."""
        return self.rows[name][self.warmup :]
