"""The cell and the record of searches in stages."""

from __future__ import annotations

from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["StagingCell", "StagingRecord"]


class StagingCell(SuiteCell):
    """Random vectors, or embeddings of a `corpus` and its questions, the first `queries` of them timed."""

    vectors: int = Field(40_000, ge=100)
    dimensions: int = Field(384, ge=1)
    queries: int = Field(200, ge=1)
    stages: int = Field(4, ge=1)
    corpus: str | None = None

    @property
    def varies_with_seed(self) -> bool:
        return False


class StagingRecord(Record):
    """CPU times of one search. Fact "final" (of a corpus): see `final_shares`."""

    called: ClassVar[str] = "a measurement of staged searches"
    is_run: ClassVar[bool] = False

    type: Literal["staging"] = "staging"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("plain_ms") or not self.rows.get("added_ms") or not self.facts.get("stages"):
            raise ValueError("times or stages are missing")
        return self

    @property
    def plain_ms(self) -> float:
        return median(self.rows["plain_ms"])

    @property
    def added_ms(self) -> float:
        return median(self.rows["added_ms"])
