"""The cell and the record of requests within a memory budget."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from ragorder.benchmarks.doll.batching.settings import PARTITION_GB, PARTITIONS, SETTINGS
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.record import Record

__all__ = ["BatchingCell", "BatchingRecord", "checked_steps"]


def checked_steps(text: str) -> str:
    if not text.startswith("steps:"):
        raise ValueError(f"arrivals come in steps, such as steps:4@20m,8@20m, got {text!r}")
    Arrivals.parse(text)
    return text


class BatchingCell(SuiteCell):
    """Requests that arrive in `steps` on a platform with a model (`setting`), with `top_k` documents each of a
    `corpus`, which systems that keep KV need. For dissections: partitions that are `resident`, the share of
    `weights` on the device, and a fixed `batch`; None: as the system decides."""

    setting: Annotated[str, one_of("setting", SETTINGS)] = "high-70b"
    steps: Annotated[str, AfterValidator(checked_steps)] = "steps:4@20m,8@20m,12@20m,16@20m"
    index: Annotated[str, one_of("index", PARTITION_GB)] = "partitions"
    top_k: int = Field(5, ge=1, le=20)
    corpus: str = "covidqa"
    resident: int | None = Field(None, ge=0, le=PARTITIONS)
    weights: float | None = Field(None, ge=0, lt=1)
    batch: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _streams(self) -> BatchingCell:
        if self.weights is not None and not SETTINGS[self.setting].streamed:
            raise ValueError(f"weights: {self.setting} has all of them on the device: choose another setting")
        return self

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals.parse(self.steps)


class BatchingRecord(Record):
    """`rows`: of each request its arrival, and seconds that it waited, was searched for and was generated for. For the
    facts see `serving`."""

    called: ClassVar[str] = "a run within a memory budget"
    facts_needed: ClassVar[tuple[str, ...]] = ("total_s", "searching_s", "generating_s", "trace")

    type: Literal["batching"] = "batching"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("at_s", "waiting_s", "retrieval_s", "generation_s", "latency_s")

    @property
    def requests(self) -> int:
        return len(self.rows["latency_s"])
