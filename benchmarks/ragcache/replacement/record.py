"""The record of replacement policies on simulated tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from ragorder.eval.running.record import Record, as_column

if TYPE_CHECKING:
    from ragorder.eval.running.record import Floats

__all__ = ["RUN", "ReplacementRecord"]

RUN = 10
"""Consecutive requests that are added up before they are compared."""

_COLUMNS = ("retrieved", "hits", "prefill_ms")
_FACTS = ("working_set_tokens", "device_tokens", "host_tokens", "seen_percent")
_TIMES = ("p50_ms", "p99_ms", "max_ms", "requests")


class ReplacementRecord(Record):
    """One policy on one stream, request by request, or (`scheduling`) its times."""

    called: ClassVar[str] = "a simulation of tiers"
    identified_by: ClassVar[tuple[str, ...]] = ("suite", "cell", "seed", "policy")

    type: Literal["replacement"] = "replacement"
    cell: dict[str, Any]
    rows: Annotated[dict[str, Any], BeforeValidator(lambda rows: rows or {})] = Field(default_factory=dict)
    facts: Annotated[dict[str, Any], BeforeValidator(lambda facts: facts or {})] = Field(default_factory=dict)
    scheduling: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.scheduling is not None:
            if not all(isinstance(self.scheduling.get(name), int | float) for name in _TIMES):
                raise ValueError("scheduling: times are missing")
            return self
        if not self.facts.keys() >= set(_FACTS):
            raise ValueError("facts are missing")
        for name in _COLUMNS:
            self.column(name)
        return self

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return () if self.scheduling is not None else _COLUMNS

    @property
    def requests(self) -> int:
        if self.scheduling is not None:
            return int(self.scheduling["requests"])
        return len(self.column("requests"))

    def column(self, name: str) -> Floats:
        if name not in self._columns:
            values = [1] * len(self.rows.get("hits", ())) if name == "requests" else self.rows[name]
            self._columns[name] = as_column(values)[self.warmup :]
        found: Floats = self._columns[name]
        return found

    def sums(self, name: str) -> Floats:
        """The column, added up over runs of up to `RUN` consecutive requests."""
        import numpy as np

        values = self.column(name)
        run = max(1, min(RUN, len(values) // 200))
        found: Floats = np.add.reduceat(values, np.arange(0, len(values), run))
        return found
