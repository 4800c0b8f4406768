"""The record of tiers on a real engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ragorder.adapters.observing.tier_stats import SOURCES
from ragorder.eval.running.record import Record, as_column

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

__all__ = ["TieringRecord"]


class TieringRecord(Record):
    """One arm in one cell with one seed. `sources` are prompt tokens by the source of their KV."""

    called: ClassVar[str] = "a measurement of tiers"
    facts_needed: ClassVar[tuple[str, ...]] = ("blocks", "host_bytes", "working_set_tokens")

    type: Literal["tiering"] = "tiering"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]
    sources: dict[str, int]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "tier" not in self.cell or not self.sources.keys() >= set(SOURCES):
            raise ValueError("the tier or sources are missing")
        return self

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "ttft_ms", "cached_tokens", "prompt_tokens"

    @property
    def requests(self) -> int:
        return len(self.ttft_ms)

    @property
    def ttft_ms(self) -> Floats:
        return as_column(self.rows["ttft_ms"])[self.warmup :]
