"""The cell and the record of what fused requests compute."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["FusedOrdersCell", "FusedOrdersRecord"]


class FusedOrdersCell(SuiteCell):
    """Requests of a `corpus`, one after the other, at an engine with room for `device_tokens`, unlimited by default.

    `copies`: of the documents that the engine holds (served), or of all, on a disk, as after `ragorder fuse build`; the
    share `recompute` of their tokens is recomputed.
    """

    corpus: str = "covidqa"
    top_k: int = Field(10, ge=1)
    order: Literal["data", "random"] = "data"
    copies: Literal["served", "all"] = "all"
    recompute: float = Field(0.15, ge=0, le=1)
    device_tokens: int | None = Field(None, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return self.order == "random"


class FusedOrdersRecord(Record):
    """By request: the tokens of its documents, those of an exact prefix, those taken over, and those computed, the
    question's among them; `seconds` are estimated from these."""

    called: ClassVar[str] = "a count of what fused requests compute"
    is_run: ClassVar[bool] = False

    type: Literal["fused-orders"] = "fused-orders"
    cell: dict[str, Any]
    rows: dict[str, list[float]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "document_tokens", "exact_tokens", "fused_tokens", "computed_tokens", "seconds"

    def total(self, column: str) -> float:
        return float(sum(self.rows[column]))
