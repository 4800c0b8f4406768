"""The cell and the record of processes in front of one engine."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["SharingCell", "SharingRecord"]


class SharingCell(SuiteCell):
    """`processes` share an engine of `capacity_tokens`, which has `in_flight` requests at a time. The others know an
    order `late` requests after the next one."""

    processes: int = Field(4, ge=1)
    workload: str
    capacity_tokens: int = Field(32_768, ge=1)
    in_flight: int = Field(16, ge=1)
    requests: int = Field(2000, ge=1)
    late: int = Field(0, ge=0)


class SharingRecord(Record):
    """`rows` of each request after the warm-up: `prompt_tokens`, `cached_tokens` and `predicted_tokens`."""

    called: ClassVar[str] = "a run of processes that share an engine"
    is_run: ClassVar[bool] = False

    type: Literal["sharing"] = "sharing"
    cell: dict[str, Any]
    rows: dict[str, list[int]]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "prompt_tokens", "cached_tokens", "predicted_tokens"

    @property
    def cached(self) -> float:
        """Share of the prompt tokens."""
        return sum(self.rows["cached_tokens"]) / max(1, sum(self.rows["prompt_tokens"]))

    @property
    def exact(self) -> float:
        """Share of the predictions that are right to the block."""
        pairs = zip(self.rows["cached_tokens"], self.rows["predicted_tokens"], strict=True)
        return sum(abs(cached - predicted) < self.block_size for cached, predicted in pairs) / max(
            1, len(self.rows["cached_tokens"])
        )
