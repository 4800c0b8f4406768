"""The cell and the record of searches of vectors on disk."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["DiskIndexCell", "DiskIndexRecord"]


class DiskIndexCell(SuiteCell):
    """A batch of `requests` searches for the `top_k` nearest of a `corpus`, or of random `vectors`. `nprobe`: share of
    the clusters that each scans; `partitions`: into which the vectors are cut; `dimensions_a_byte` of the codes;
    `factor`: candidates for each result that are refined."""

    corpus: str | None = None
    vectors: int = Field(50_000, ge=1000)
    dimensions: int = Field(64, ge=8)
    requests: int = Field(64, ge=1)
    top_k: int = Field(5, ge=1)
    nprobe: float = Field(0.25, gt=0, le=1)
    partitions: int = Field(32, ge=1)
    dimensions_a_byte: int = Field(4, ge=1)
    factor: int = Field(8, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.corpus is None


class DiskIndexRecord(Record):
    """Of a batch: `memory_bytes` of codes and vectors held, `read_bytes` from disk, and its `recall`."""

    called: ClassVar[str] = "a measurement of an index on disk"
    is_run: ClassVar[bool] = False
    facts_needed: ClassVar[tuple[str, ...]] = ("memory_bytes", "read_bytes", "recall", "vector_bytes")

    type: Literal["disk-index"] = "disk-index"
    cell: dict[str, Any]
