"""The cell and the record of all three systems together."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["AllThreeCell", "AllThreeRecord"]


class AllThreeCell(SuiteCell):
    """Requests at `rate` a second on a corpus of 40 documents and others that are never found, `vectors` in all, in
    `clusters` of which a search scans `nprobe`. Of copies a share `recompute` is recomputed. `idle_layers` give the
    model the bytes and times of a larger one; what does not fit into `device_bytes` is read at `bytes_per_s`."""

    requests: int = Field(120, ge=1)
    rate: float = Field(2.0, gt=0)
    top_k: int = Field(8, ge=2, le=24)
    recompute: float = Field(0.15, ge=0, le=1)
    idle_layers: int = Field(12, ge=1, le=64)
    device_bytes: int = Field(260 << 20, ge=1)
    bytes_per_s: float = Field(1e9, gt=0)
    vectors: int = Field(100_000, ge=100)
    clusters: int = Field(256, ge=1)
    nprobe: int = Field(128, ge=1)


class AllThreeRecord(Record):
    """`rows`: seconds from each request's arrival to its answer, and 1 for a right one. Facts: prompt tokens, tokens
    that the engine computed, its steps, and bytes of weights that were read for them."""

    called: ClassVar[str] = "a run of all three systems"
    facts_needed: ClassVar[tuple[str, ...]] = ("prompt_tokens", "computed_tokens", "steps", "streamed_bytes")

    type: Literal["all-three"] = "all-three"
    cell: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_s", "right")

    @property
    def requests(self) -> int:
        return len(self.rows["latency_s"])
