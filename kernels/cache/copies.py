"""Running copies between pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ragorder.kernels.paging import BlockPool, Transfer, Transfers


class Copy:
    """A transfer that retains its blocks; `then` gets whether it succeeded. `leaving`: nothing else holds the source's
    blocks. `distrusted`: the source's device failed meanwhile."""

    def __init__(
        self,
        transfers: Transfers,
        source: BlockPool,
        source_blocks: Sequence[int],
        target: BlockPool,
        target_blocks: Sequence[int],
        then: Callable[[bool], None] | None,
    ) -> None:
        self.source, self.source_blocks = source, tuple(source_blocks)
        self.target, self.target_blocks = target, tuple(target_blocks)
        self.then = then
        self.leaving = self.distrusted = False
        source.retain(self.source_blocks)
        target.retain(self.target_blocks)
        self.holds_source = True
        self.transfer: Transfer = transfers.start(source, self.source_blocks, target, self.target_blocks)

    @property
    def failed(self) -> bool:
        return self.distrusted or self.transfer.failed

    def free_source(self) -> None:
        """Release the source's blocks, once later computations may overwrite them."""
        if self.holds_source:
            self.transfer.fence()
            self._release_source()

    def end(self) -> None:
        self._release_source()
        self.target.release(self.target_blocks)
        if self.then is not None:
            self.then(not self.failed)

    def _release_source(self) -> None:
        if self.holds_source:
            self.holds_source = False
            self.source.release(self.source_blocks)


class Copies:
    """`poll` handles ended copies. Not thread-safe."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._running: list[Copy] = []

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self,
        source: BlockPool,
        source_blocks: Sequence[int],
        target: BlockPool,
        target_blocks: Sequence[int],
        then: Callable[[bool], None] | None = None,
    ) -> Copy:
        copy = Copy(self._transfers, source, source_blocks, target, target_blocks, then)
        self._running.append(copy)
        return copy

    def poll(self) -> None:
        ended: list[Copy] = []
        running: list[Copy] = []
        for copy in self._running:
            (ended if copy.transfer.done else running).append(copy)
        if ended:
            # A callback may begin another copy.
            self._running = running
            for copy in ended:
                copy.end()

    def leaving(self, pool: BlockPool) -> int:
        """Return the number of blocks that running copies will free."""
        held = Counter(block for copy in self._leaving(pool) for block in copy.source_blocks)
        return sum(pool.references(block) == count for block, count in held.items())

    def free(self, pool: BlockPool, blocks: int) -> None:
        """Wait, oldest copies first, until `blocks` blocks are free or no copy leaves the pool."""
        for copy in self._leaving(pool):
            if pool.free_blocks >= blocks:
                return
            copy.free_source()

    def _leaving(self, pool: BlockPool) -> list[Copy]:
        return [copy for copy in self._running if copy.source is pool and copy.leaving and copy.holds_source]

    def distrust(self, pool: BlockPool) -> None:
        for copy in self._running:
            copy.distrusted |= copy.source is pool

    def wait(self) -> None:
        while self._running:
            self._running[0].transfer.wait()
            self.poll()

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._transfers.close()
