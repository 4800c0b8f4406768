"""The cell and the record of a simulated fleet."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["ReplicasCell", "ReplicasRecord"]


class ReplicasCell(SuiteCell):
    """`replicas` with `capacity_tokens` each serve a workload or the questions of a corpus, `in_flight` at a time each.

    A topic has at most a `share` of the requests. With `changes` a replica is added after a third of the requests, and
    another removed after two thirds.
    """

    replicas: int = Field(16, ge=2)
    workload: str | None = None
    corpus: str | None = None
    capacity_tokens: int = Field(16_384, ge=1)
    in_flight: int = Field(4, ge=1)
    requests: int = Field(2400, ge=1)
    top_k: int | None = Field(None, ge=1)
    share: float = Field(1 / 32, gt=0, le=1)
    changes: bool = False

    @model_validator(mode="after")
    def _one_trace(self) -> Self:
        if (self.workload is None) == (self.corpus is None):
            raise ValueError("give either workload or corpus")
        return self


class ReplicasRecord(Record):
    """`rows` have an entry for each replica that served at all: `requests`, `prompt_tokens` and `cached_tokens` after
    the warm-up, and whether it was `always` there. Facts: the share of `exact` predictions (to the block), the
    `topics`, the shares of them that `moved`, in order of the changes, and the largest number `in_flight` over the
    mean."""

    called: ClassVar[str] = "a run of a fleet"
    is_run: ClassVar[bool] = False
    facts_needed: ClassVar[tuple[str, ...]] = ("exact", "in_flight")

    type: Literal["replicas"] = "replicas"
    cell: dict[str, Any]
    rows: dict[str, list[int]]
    facts: dict[str, Any]

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "requests", "prompt_tokens", "cached_tokens", "always"

    @property
    def cached(self) -> float:
        """Share of the prompt tokens."""
        return sum(self.rows["cached_tokens"]) / max(1, sum(self.rows["prompt_tokens"]))

    @property
    def load(self) -> float:
        """The most tokens computed by a replica that was always there, over their mean."""
        columns = (self.rows[name] for name in ("prompt_tokens", "cached_tokens", "always"))
        computed: list[int] = [prompt - cached for prompt, cached, always in zip(*columns, strict=True) if always]
        return float(max(computed) * len(computed) / max(1, sum(computed)))
