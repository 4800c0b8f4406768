"""Cells of batches on real parts."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field

from ragorder.eval.data.arrivals import Arrivals
from ragorder.eval.running.cells import SuiteCell


def _checked_steps(text: str) -> str:
    if not text.startswith("steps:"):
        raise ValueError(f"arrivals come in steps, such as steps:4@10m,8@10m, got {text!r}")
    Arrivals.parse(text)
    return text


class BatchingLiveCell(SuiteCell):
    """Requests that arrive in `steps`, played `scale` times as fast as the paper's. Reading all `layers` takes
    `step_s`, reading all `vectors` of the index `pass_s`: seconds of the paper's scale.

    Memory holds the weights outside the layers, buffers, and the KV of `serial_most` requests with five documents:
    no layer and no partition stays beside that. A placement has at most `most` requests at once. `index`: a search
    needs all of 32 `partitions`, or the nearest sixteenth of 512 "lists" that are read one by one.
    """

    steps: Annotated[str, AfterValidator(_checked_steps)] = "steps:4@10m,8@10m,12@10m,16@10m"
    scale: float = Field(60.0, gt=0)
    step_s: float = Field(6.9, gt=0)
    pass_s: float = Field(303.0, gt=0)
    most: int = Field(64, ge=1)
    serial_most: int = Field(48, ge=1)
    layers: int = Field(12, ge=2)
    hidden_size: int = Field(256, ge=64, multiple_of=64)
    index: Literal["partitions", "lists"] = "partitions"
    vectors: int = Field(612_000, ge=1000)
    dimensions: int = Field(32, ge=1)
    top_k: int = Field(5, ge=1)
    document_words: int = Field(5, ge=1)
    documents: int = Field(240, ge=10)

    @property
    def arrivals(self) -> Arrivals:
        return Arrivals.parse(self.steps, time_scale=self.scale)

    @property
    def requests(self) -> int:
        return self.arrivals.count or 0


class LiveSystem(NamedTuple):
    """`slots`: buffers of layers, None: as placed; `ordered`: documents, and requests by their cached share."""

    words: str
    slots: int | None = None
    ordered: bool = False
    serial: bool = False


SERIAL = "serial"
POLICIES = {
    SERIAL: LiveSystem("serial static batches", 4, serial=True),
    "no prefetch": LiveSystem("decoupled, layers read when needed", 1),
    "one ahead": LiveSystem("decoupled, one layer ahead", 2),
    "decoupled": LiveSystem("decoupled (ours)"),
    "decoupled+order": LiveSystem("decoupled, ordered (ours)", ordered=True),
}
