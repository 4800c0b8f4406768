"""The cell and the record of batches that a KV cache holds."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["ANSWER_TOKENS", "SUFFIX_TOKENS", "BatchKVCell", "BatchKVRecord"]

ANSWER_TOKENS = 32
SUFFIX_TOKENS = 32 + ANSWER_TOKENS
"""Question and answer."""


class BatchKVCell(SuiteCell):
    """`waiting` requests with `top_k` documents of a `corpus`, in its order or `shuffled`. The cache has room for
    `batch` of them if nothing is shared; each step streams `streamed_gb` of weights (90 % of Llama 3.1 70B in
    bfloat16)."""

    corpus: str = "covidqa"
    waiting: int = Field(800, ge=1)
    top_k: int = Field(5, ge=1, le=20)
    batch: int = Field(48, ge=1)
    shuffled: bool = True
    streamed_gb: float = Field(127.0, gt=0)

    @property
    def varies_with_seed(self) -> bool:
        return self.shuffled


class BatchKVRecord(Record):
    """`rows["batch"]`: requests in each batch. See `measuring` for the facts."""

    called: ClassVar[str] = "a measurement of batches"
    is_run: ClassVar[bool] = False

    type: Literal["batch-kv"] = "batch-kv"
    cell: dict[str, Any]
    rows: dict[str, list[int]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("batch") or not {"served_tokens", "kv_tokens", "steps"} <= self.facts.keys():
            raise ValueError("batches or their tokens are missing")
        return self

    @property
    def requests(self) -> int:
        return sum(self.rows["batch"])

    def tokens_per_gb(self, streamed_gb: float) -> float:
        """Prompt and answer tokens served by a streamed gigabyte."""
        return float(self.facts["served_tokens"] / (self.facts["steps"] * streamed_gb))
