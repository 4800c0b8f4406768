"""Cells of the suites of kind "tiering"."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ragorder.benchmarks.ragcache.tiering import ROOMS
from ragorder.eval.running.cells import SuiteCell
from ragorder.trie.policies import POLICIES

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
    """`tier` is what the working set fits: "device", its pool; "host", four times the pool, and host memory; "beyond",
    twice the host memory as well; "disk", the same with a disk. Servers take turns of `segment` requests."""

    tier: Annotated[str, AfterValidator(_room)]
    corpus: str = "pydocs"
    top_k: int = Field(2, ge=1)
    block_size: int = Field(32, ge=1)
    replacement: Annotated[str, AfterValidator(_known)] = "pgdsf"
    device_order: bool = True
    segment: int = Field(10, ge=1)

    @property
    def stream(self) -> tuple[str, int, int]:
        """Equal for cells that serve the same requests."""
        return self.corpus, self.top_k, self.block_size
