"""The cell and the record of the workflow server's own time."""

from __future__ import annotations

from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["WavefrontCell", "WavefrontRecord"]


class WavefrontCell(SuiteCell):
    """`requests` of IRG, `in_flight` at a time, whose searches have `stages` and whose answers have `tokens`; measured
    `repeats` times."""

    in_flight: int = Field(100, ge=1)
    requests: int = Field(300, ge=1)
    stages: int = Field(8, ge=1)
    tokens: int = Field(32, ge=1)
    repeats: int = Field(5, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


class WavefrontRecord(Record):
    """`rows["ms"]`: processor time a piece, the far ends' taken off. Facts: `pieces` and `speculative` ones among them,
    `cycles`, and what was taken off, `far_ends_ms`."""

    called: ClassVar[str] = "a measurement of the workflow server's time"
    is_run: ClassVar[bool] = False

    type: Literal["wavefront"] = "wavefront"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("ms") or not self.facts.get("pieces"):
            raise ValueError("times or pieces are missing")
        return self

    @property
    def ms(self) -> float:
        return median(self.rows["ms"])
