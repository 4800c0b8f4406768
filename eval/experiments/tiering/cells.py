"""A cell of a suite about tiers on a real engine: what they hold, and of which requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ragorder.eval.experiments.tiering import ROOMS
from ragorder.eval.running.cells import SuiteCell
from ragorder.kernels.policies import POLICIES

__all__ = ["TieringCell"]


def _known(value: str) -> str:
    if value not in POLICIES:
        raise ValueError(f"there is no replacement policy {value!r}: choose one of {', '.join(POLICIES)}")
    return value


def _room(value: str) -> str:
    if value not in ROOMS:
        raise ValueError(f"the working set fits {', '.join(ROOMS)}, not {value!r}")
    return value


class TieringCell(SuiteCell):
    """What one cell may say. `tier` says what the working set fits: "device", the device's pool; "host", four times the
    pool, and host memory; "beyond", twice the host memory as well, and nothing behind it; "disk", the same with a disk.

    `corpus` is a folder below --corpora, or "pydocs"; its requests come in random order, each with its first `top_k`
    documents. `replacement` and `device_order` are settings of the tiers, and blocks of `block_size` tokens those of
    the engine. The servers with and without tiers take turns of `segment` requests.
    """

    tier: Annotated[str, AfterValidator(_room)]
    corpus: str = "pydocs"
    top_k: int = Field(2, ge=1)
    block_size: int = Field(32, ge=1)
    replacement: Annotated[str, AfterValidator(_known)] = "pgdsf"
    device_order: bool = True
    segment: int = Field(10, ge=1)

    @property
    def stream(self) -> tuple[str, int, int]:
        """What the requests depend on: cells that have it in common are served the same ones."""
        return self.corpus, self.top_k, self.block_size
