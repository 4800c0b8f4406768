"""The cell and the record of searches that share their time."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["PartitionCell", "PartitionRecord"]


class PartitionCell(SuiteCell):
    """Single searches that arrive at random (Poisson), at `load` of what `cores` can do.

    - real: random `vectors` in an IVF index of 4 sqrt(n) clusters, of which a search scans the share `nprobe`;
      `mixed`: a quarter, half, all, or twice of that
    - virtual: HedraRAG's index (38 million vectors of 1,024 dimensions, 4,096 clusters, nprobe 256), by costs that the
      real clock's facts say: of a code of 128 dimensions and a call, of a piece, and of handing a share to a thread
    """

    clock: Literal["real", "virtual"] = "real"
    cores: int = Field(1, ge=1)
    load: float = Field(0.5, gt=0, lt=1)
    mixed: bool = False
    vectors: int = Field(200_000, ge=1000)
    dimensions: int = Field(128, ge=1)
    nprobe: float = Field(0.25, gt=0, le=0.5)
    requests: int = Field(150, ge=1)
    code_ns: float = Field(77.0, gt=0)
    call_us: float = Field(90.0, gt=0)
    overhead_ms: float = Field(0.2, gt=0)
    hand_us: float = Field(12.0, gt=0)


class PartitionRecord(Record):
    """`rows["latency_ms"]`: from arrival to the final result. Facts: `search_ms`, a whole search on one core, and the
    costs that a virtual clock goes by."""

    called: ClassVar[str] = "a measurement of searches that share their time"
    is_run: ClassVar[bool] = False
    facts_needed: ClassVar[tuple[str, ...]] = ("search_ms",)

    type: Literal["partition"] = "partition"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return ("latency_ms",)
