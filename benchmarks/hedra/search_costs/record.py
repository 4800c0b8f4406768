"""The cell and the record of the smallest pieces of work."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["CostsCell", "CostsRecord"]


class CostsCell(SuiteCell):
    """`calls` that scan clusters of an index of random vectors, and `steps` of a model of one `shape`."""

    vectors: int = Field(100_000, ge=1000)
    dimensions: int = Field(128, ge=1)
    calls: int = Field(1000, ge=16)
    shape: Literal["tiny", "small"] = "small"
    steps: int = Field(10, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


class CostsRecord(Record):
    """Scans: `rows["codes"]` and `rows["ms"]` of each call, the `predicted_ms` of it from those before, and facts:
    milliseconds of the `clusters` one by one, and of a call with several `queries`. Decoding: `rows["ms"]`, a step's,
    by `rows["requests"]` and `rows["context"]`."""

    called: ClassVar[str] = "a measurement of the smallest pieces of work"
    is_run: ClassVar[bool] = False

    type: Literal["search-costs"] = "search-costs"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        scans = ("codes", "ms", "predicted_ms")
        return scans if self.policy == "scans" else ("requests", "context", "ms")
