"""Protocols of copies between pools, beside computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ragorder.kernels.paging.pool import BlockPool

__all__ = ["Transfer", "Transfers", "runs"]


class Transfer(Protocol):
    """A copy under way: its source must not be written, nor either side reused."""

    @property
    def done(self) -> bool:
        """Ended: the target may be read."""

    @property
    def failed(self) -> bool:
        """Ended without copying: the target may hold anything."""

    def wait(self) -> None:
        """Block until it has ended; any thread may call."""

    def fence(self) -> None:
        """Order later computations behind the copy. Blocks on a CPU only."""


class Transfers(Protocol):
    """Copies in the order of their starts, each behind all computations queued before."""

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> Transfer:
        """Copy blocks to those at the same places of the other list; the pools have one shape."""

    def close(self) -> None:
        """Wait for copies under way, and stop."""


def runs(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks that are adjacent in both pools, as (first source, first target, count).

    Raises ValueError for lists of different lengths.
    """
    if len(source_blocks) != len(target_blocks):
        raise ValueError(f"{len(source_blocks)} blocks cannot be copied into {len(target_blocks)}")
    begin = 0
    for end in range(1, len(source_blocks) + 1):
        count = end - begin
        if (
            end == len(source_blocks)
            or source_blocks[end] != source_blocks[begin] + count
            or target_blocks[end] != target_blocks[begin] + count
        ):
            yield source_blocks[begin], target_blocks[begin], count
            begin = end
