"""The cell and the record of searches in stages."""

from __future__ import annotations

from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["StagingCell", "StagingRecord"]


class StagingCell(SuiteCell):
    """What one cell may say: random `vectors` of so many `dimensions`, or the embeddings of a `corpus` (its questions
    are the queries, the first `queries` of them timed)."""

    vectors: int = Field(40_000, ge=100)
    dimensions: int = Field(384, ge=1)
    queries: int = Field(200, ge=1)
    stages: int = Field(4, ge=1)
    corpus: str | None = None

    @property
    def varies_with_seed(self) -> bool:
        return False


class StagingRecord(Record):
    """One search: CPU time of each query without stages and what stages add, in ms. `facts`: the index, the number of
    stages; of a corpus, for each k the share of questions whose top k is final, stage by stage."""

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
