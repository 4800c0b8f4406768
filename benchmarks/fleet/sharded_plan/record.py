"""The cell and the record of a batch planned by `ragorder plan`."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["ShardedPlanCell", "ShardedPlanRecord"]


class ShardedPlanCell(SuiteCell):
    """A batch of `requests`, planned in `shards` by `workers` processes. One plan is made of at most
    `one_plan_requests`."""

    workload: str = "topics"
    requests: int = Field(30_000, ge=1)
    shards: int = Field(64, ge=1)
    workers: int = Field(2, ge=1)
    one_plan_requests: int = Field(100_000, ge=1)


class ShardedPlanRecord(Record):
    """`rows` has one entry of `tokens` and `saved_tokens`: of all documents, and of those shared with the request
    before. Facts: `core_s` of all processes, `peak_bytes` of their memory together, and `largest`, the tokens of the
    largest shard over the mean."""

    called: ClassVar[str] = "a plan in shards"
    is_run: ClassVar[bool] = False

    type: Literal["sharded_plan"] = "sharded_plan"
    cell: dict[str, Any]
    rows: dict[str, list[int]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("tokens") or not self.rows.get("saved_tokens") or "core_s" not in self.facts:
            raise ValueError("tokens or core seconds are missing")
        return self

    @property
    def saved(self) -> float:
        """Share of the documents' tokens."""
        return sum(self.rows["saved_tokens"]) / max(1, sum(self.rows["tokens"]))
