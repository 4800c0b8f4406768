"""The record of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ragorder.eval.running.record import Record, as_column

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

__all__ = ["PipeliningRecord"]


class PipeliningRecord(Record):
    """One cell with one seed: rows by mode and column."""

    called: ClassVar[str] = "a measurement of a pipeline"

    type: Literal["pipelining"] = "pipelining"
    cell: dict[str, Any]
    rows: dict[str, dict[str, list[Any]]]
    system_tokens: int

    @model_validator(mode="after")
    def _even(self) -> Self:
        if len({len(values) for columns in self.rows.values() for values in columns.values()}) != 1:
            raise ValueError("columns of different lengths")
        return self

    @property
    def requests(self) -> int:
        throughput = self.figures("none", "requests")
        if len(throughput):
            return int(sum(self.figures(mode, "requests").sum() for mode in self.rows))
        return sum(len(self.figures(mode, "ttft_ms")) for mode in self.rows)

    def figures(self, mode: str, name: str) -> Floats:
        """Numbers of a mode after the warm-up, NaN for None."""
        return as_column(self.rows.get(mode, {}).get(name, ()))[self.warmup :]

    def entries(self, mode: str, name: str) -> Sequence[Any]:
        """Entries of a mode after the warm-up."""
        return self.rows.get(mode, {}).get(name, ())[self.warmup :]
