"""Cells of the attention kernels."""

from __future__ import annotations

import re
from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ragorder.eval.running.cells import SeedlessCell
from ragorder.eval.running.record import Record

TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1.6e-2}
"""Greatest error of a number, above 1 relative to it."""


def _heads(value: str) -> str:
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", value)
    if found is None or int(found[1]) % int(found[2]):
        raise ValueError(f"{value!r}: give query heads and KV heads such as 32/8")
    return value


class AttentionCell(SeedlessCell):
    """`batch` requests, each of `query` new tokens after `context` cached ones, or `scattered` evenly in the place of
    some of these, the last one at the end; `heads`: "32/8" (query/KV). Without `timed`, results are checked only."""

    batch: int = Field(1, ge=1)
    query: int = Field(ge=1)
    context: int = Field(0, ge=0)
    scattered: bool = False
    heads: Annotated[str, AfterValidator(_heads)] = "32/8"
    head_dim: int = Field(128, ge=1)
    dtype: Literal["fp16", "bf16", "fp32"] = "bf16"
    block_size: int = Field(16, ge=1, le=1024)
    repeats: int = Field(50, ge=30)
    timed: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.scattered and self.query > self.context:
            raise ValueError(f"{self.query} tokens cannot be scattered among {self.context}: give a smaller query")
        return self

    @property
    def shape(self) -> dict[str, Any]:
        heads, kv_heads = map(int, self.heads.split("/"))
        names = ("batch", "query", "context", "scattered", "head_dim", "dtype", "block_size")
        return {**{name: getattr(self, name) for name in names}, "heads": heads, "kv_heads": kv_heads}


class AttentionRecord(Record):
    """One contender on one problem. Column `ms` is empty without a GPU, or for a wrong result."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not (isinstance(self.rows.get("ms"), list) and self.setting):
            raise ValueError("times are missing")
        return self

    @property
    def setting(self) -> AttentionCell:
        return AttentionCell.model_validate(self.cell)

    @property
    def right(self) -> bool:
        return float(self.facts["error"]) <= TOLERANCE[self.setting.dtype]

    @property
    def median_ms(self) -> float | None:
        return median(self.rows["ms"]) if self.rows["ms"] else None
