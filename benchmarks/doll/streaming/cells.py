"""Cells of streamed weights."""

from __future__ import annotations

from pydantic import Field

from ragorder.eval.running.cells import SeedlessCell

# Buffers for layers on the device, by policy; None: all that the budget has room for.
SLOTS: dict[str, int | None] = {"no prefetch": 1, "one ahead": 2, "two ahead": 3, "ring": None}


class StreamingCell(SeedlessCell):
    """A Llama of `layers`, `budget_layers` of them with room on the device, read at `gigabytes_s`; reading and
    computing a layer take up to the share `jitter` more or less. `repeats` turns of `steps` steps are measured."""

    gigabytes_s: float = Field(1.0, gt=0)
    jitter: float = Field(0.0, ge=0, lt=1)
    layers: int = Field(24, ge=2)
    budget_layers: int = Field(4, ge=1)
    hidden_size: int = Field(1024, ge=64, multiple_of=64)
    intermediate_size: int = Field(3264, ge=64)
    repeats: int = Field(3, ge=1)
    steps: int = Field(3, ge=1)
