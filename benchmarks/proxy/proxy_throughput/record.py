"""The cell and the record of a proxy at ever higher rates."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["ThroughputCell", "ThroughputRecord"]


class ThroughputCell(SuiteCell):
    """A proxy of so many `workers` gets requests on 64 connections: `first` a second for so many `seconds`, then
    `growth` times as many, up to `most`, until it adds more than `added_ms` to one request in a hundred."""

    workers: int = Field(1, ge=1)
    first: float = Field(100.0, gt=0)
    growth: float = Field(1.25, gt=1)
    most: float = Field(20_000.0, gt=0)
    seconds: float = Field(5.0, gt=0)
    added_ms: float = Field(15.0, gt=0)

    @model_validator(mode="after")
    def _rising(self) -> Self:
        if self.most < self.first:
            raise ValueError("most is the last rate: at least that of first")
        return self


class ThroughputRecord(Record):
    """`rows` have an entry for each rate: requests a second as `asked` and as they `came` back, the `added_p50_ms` and
    `added_p99_ms` of the proxy, its processor time for a request in ms (`cpu_ms`), and whether the rate `holds`."""

    called: ClassVar[str] = "a run of the proxy"
    is_run: ClassVar[bool] = False

    type: Literal["proxy-throughput"] = "proxy-throughput"

    @property
    def columns_needed(self) -> tuple[str, ...]:
        return "asked", "came", "added_p50_ms", "added_p99_ms", "cpu_ms", "holds"

    @property
    def best(self) -> int | None:
        """The place of the highest rate that holds."""
        holding = [place for place, holds in enumerate(self.rows["holds"]) if holds]
        return holding[-1] if holding else None
