"""Cells of batches on real parts."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ragorder.benchmarks.doll.batching.settings import checked_steps
from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteCell


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

    @property
    def requests(self) -> int:
        return self.arrivals.count or 0
