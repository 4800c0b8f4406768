"""What copies blocks from one pool into another while others compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from ragorder.kernels.paging.pool import BlockPool

__all__ = ["Transfer", "Transfers", "runs"]


class Transfer(Protocol):
    """A copy under way. Until it has ended, nobody may write its source or reuse either side."""

    @property
    def done(self) -> bool:
        """Whether it has ended. Then the target may be read, by whomever."""

    @property
    def failed(self) -> bool:
        """Whether it has ended without having copied: the target may hold anything."""

    def wait(self) -> None:
        """Until it has ended. Any thread may wait."""

    def fence(self) -> None:
        """Whatever the caller computes from now on comes after the copy, so that the source may be written anew. A GPU
        waits for that by itself; without one, this is `wait`."""


class Transfers(Protocol):
    """Copies begin in the order in which they are started. A copy sees all that the caller has computed, or has given
    the GPU to compute, until it starts it."""

    def start(
        self, source: BlockPool, source_blocks: Sequence[int], target: BlockPool, target_blocks: Sequence[int]
    ) -> Transfer:
        """Copy blocks, each into the one with the same place in the other list. The pools have the same shape."""

    def close(self) -> None:
        """Once the copies under way have ended."""


def runs(source_blocks: Sequence[int], target_blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks that lie side by side in both pools, as (first source, first target, how many): one copy each.

    Raises ValueError if the lists are not of the same length.
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
