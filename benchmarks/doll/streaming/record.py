"""The cell and the record of steps with streamed weights."""

from __future__ import annotations

from statistics import median
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ragorder.eval.running.cells import SuiteCell
from ragorder.eval.running.record import Record

__all__ = ["SLOTS", "StreamingCell", "StreamingRecord"]

# Buffers for layers on the device, by policy; None: all that the budget has room for.
SLOTS: dict[str, int | None] = {"no prefetch": 1, "one ahead": 2, "two ahead": 3, "ring": None}


class StreamingCell(SuiteCell):
    """A Llama of so many `layers`, of which `budget_layers` have room on the device, read at `gigabytes_s`; reading and
    computing a layer take up to the share `jitter` more or less. `repeats` turns of `steps` steps are measured."""

    gigabytes_s: float = Field(1.0, gt=0)
    jitter: float = Field(0.0, ge=0, lt=1)
    layers: int = Field(24, ge=2)
    budget_layers: int = Field(4, ge=1)
    hidden_size: int = Field(1024, ge=64, multiple_of=64)
    intermediate_size: int = Field(3264, ge=64)
    repeats: int = Field(3, ge=1)
    steps: int = Field(3, ge=1)

    @property
    def varies_with_seed(self) -> bool:
        return False


class StreamingRecord(Record):
    """`rows["step_s"]`: seconds of each step. Facts: `stream_s` and `compute_s`, a step's reading and computing alone;
    `tokens` of a step; `bytes` read, `waits` for layers and `waits_s` a step; `slots`; whether the logits are
    `equal` to those of the first policy."""

    called: ClassVar[str] = "a measurement of streamed weights"
    is_run: ClassVar[bool] = False

    type: Literal["streaming"] = "streaming"
    cell: dict[str, Any]
    rows: dict[str, list[float]]
    facts: dict[str, Any]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if not self.rows.get("step_s") or not self.facts.get("stream_s") or not self.facts.get("compute_s"):
            raise ValueError("the times of steps, reading or computing are missing")
        return self

    @property
    def step_s(self) -> float:
        return median(self.rows["step_s"])

    @property
    def bound_s(self) -> float:
        """What no step can be shorter than."""
        return max(float(self.facts["stream_s"]), float(self.facts["compute_s"]))
