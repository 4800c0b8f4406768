"""Records of answers from reused KV, and of training."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from ragorder.benchmarks.fusion.fusion.cells import FusionCell
from ragorder.eval.running.record import Record

__all__ = ["FusionRecord", "TrainingRecord"]


class FusionRecord(Record):
    """One way to reuse KV: columns by ratio, 1 where the answer is right, and "deviation", or by the engine "wall_ms"
    and "cpu_ms" by ratio. Facts: `exact`, the share of the
    documents in an exact prefix; `tokens` of all documents; `retrieved`, the share of their neighbours among them;
    their mean `deviation`, or by the engine how many answers were `compared` with the reference's, how many are
    `others`, and how far logits are `apart` at most."""

    called: ClassVar[str] = "a measurement of answers from reused KV"

    type: Literal["fusion"] = "fusion"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.ratios or len({len(column) for column in self.rows.values()}) != 1:
            raise ValueError("columns of different lengths, or none")
        if not {"exact", "tokens"} <= self.facts.keys():
            raise ValueError("facts are missing")
        return self

    @property
    def setting(self) -> FusionCell:
        return FusionCell.model_validate(self.cell)

    @property
    def ratios(self) -> list[float]:
        return [float(name) for name in self.rows if name[0].isdigit()]

    @property
    def requests(self) -> int:
        return len(next(iter(self.rows.values())))


class TrainingRecord(Record):
    """The training of one model: processor time, tokens, hops and documents, and the share of right predictions by
    kind. Fact `bytes`: of its file."""

    called: ClassVar[str] = "a training"
    is_run: ClassVar[bool] = False

    type: Literal["fusion-training"] = "fusion-training"
    cell: dict[str, Any]
    rows: dict[str, list[float | None]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("seconds") or len({len(column) for column in self.rows.values()}) != 1:
            raise ValueError("columns of different lengths, or none")
        return self
