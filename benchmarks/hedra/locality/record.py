"""The cell and the record of successive searches."""

from __future__ import annotations

from statistics import fmean
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["LocalityCell", "LocalityRecord"]


class LocalityCell(SuiteCell):
    """Two searches for each question of a `corpus`: for the question, and for the question with the first
    `generated` share of its first document, which stands for an answer in the making (IRG)."""

    corpus: str = "pydocs"
    questions: int = Field(300, ge=1)
    nprobe: float = Field(0.5, gt=0, le=1)
    generated: float = Field(0.5, gt=0, le=1)
    top_k: int = Field(2, ge=1, le=20)

    @property
    def varies_with_seed(self) -> bool:
        return False


class LocalityRecord(Record):
    """`rows["final_at"]`: clusters after which a second search's best no longer changed. See `measuring` for the
    facts."""

    called: ClassVar[str] = "a measurement of successive searches"
    is_run: ClassVar[bool] = False

    type: Literal["locality"] = "locality"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("final_at") or not self.facts.get("nprobe"):
            raise ValueError("the clusters after which searches are final, or nprobe, are missing")
        return self

    @property
    def mean_final_at(self) -> float:
        return fmean(self.rows["final_at"])

    def final_share(self, scanned: float) -> float:
        """Of searches, those whose results are final after this share of their clusters."""
        final_at = self.rows["final_at"]
        clusters = scanned * float(self.facts["nprobe"])
        return sum(number <= clusters for number in final_at) / len(final_at)
