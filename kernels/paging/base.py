"""Protocols of copies between pools, beside computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ragorder.kernels.paging.pool import BlockPool

__all__ = ["Transfer", "Transfers", "runs"]


class Transfer(Protocol):
    """A copy under way. Until it has ended, its source must not be written, nor either side reused."""

    @property
    def done(self) -> bool:
        """Whether it has ended: the target may be read."""

    @property
    def failed(self) -> bool:
        """Whether it has ended without copying: the target may hold anything."""

    def wait(self) -> None:
        """Wait until it has ended, on any thread."""

    def fence(self) -> None:
        """Order later computations behind the copy, so that they may overwrite the source. Blocks on a CPU only."""


class Transfers(Protocol):
    """Makes copies in the order of their starts, each seeing all computations queued before `start`."""

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> Transfer:
        """Copy blocks, each to the one at the same place in the other list, between pools of the same shape."""

    def close(self) -> None:
        """Wait for the copies under way, and stop."""


def runs(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of blocks that are adjacent in both pools, as (first source, first target, count).

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
