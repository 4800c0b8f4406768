"""The cell and the record of requests within a memory budget, in real time."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from ragorder.benchmarks.doll.batching.record import checked_steps
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["BatchingLiveCell", "BatchingLiveRecord"]


class BatchingLiveCell(SuiteCell):
    """Requests that arrive in `steps`, played `scale` times as fast as the paper's. A step streams the weights of
    `layers` in `step_s`, a pass over `partitions` of `vectors` reads them in `pass_s`: seconds of the paper's scale. KV
    has room for `most` requests if nothing is shared, and for `serial_most` where no partitions lie beside it."""

    steps: Annotated[str, AfterValidator(checked_steps)] = "steps:4@20m,8@20m,12@20m,16@20m"
    scale: float = Field(60.0, gt=0)
    step_s: float = Field(6.9, gt=0)
    pass_s: float = Field(303.0, gt=0)
    most: int = Field(48, ge=1)
    serial_most: int = Field(64, ge=1)
    layers: int = Field(8, ge=2)
    hidden_size: int = Field(128, ge=64, multiple_of=64)
    partitions: int = Field(32, ge=1)
    vectors: int = Field(20_000, ge=1000)
    dimensions: int = Field(32, ge=1)
    top_k: int = Field(5, ge=1)
    document_words: int = Field(16, ge=1)
    documents: int = Field(400, ge=10)

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals.parse(self.steps, time_scale=self.scale)


class BatchingLiveRecord(Record):
    """`rows`: seconds from each request's arrival to its answer. Facts: seconds until the last; share of the layers
    that a step read; seconds of a pass as it was read; of a step, and of one beside reading (medians; None: no such
    step); prompt tokens and cached ones."""

    called: ClassVar[str] = "a run within a memory budget, in real time"
    facts_needed: ClassVar[tuple[str, ...]] = ("total_s", "prompt_tokens", "cached_tokens")

    type: Literal["batching-live"] = "batching-live"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_s",)

    @property
    def requests(self) -> int:
        return len(self.rows["latency_s"])
