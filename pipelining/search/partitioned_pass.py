"""Passes over the partitions of an index, which other queries may join where they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from numpy.typing import NDArray

from ragorder.pipelining.search.partition_file import PartitionLists
from ragorder.pipelining.search.pass_rows import PassRows
from ragorder.pipelining.staged import Stage

if TYPE_CHECKING:
    import numpy as np

    from ragorder.pipelining.search.partitioned import PartitionedSearch

__all__ = ["PartitionWalk", "PartitionedPass"]


class PartitionedPass(Iterator[Stage]):
    """The stages of one search. `rows` hold what each query has found and what it still needs: a checkpoint, also of
    some of the queries alone (`rows.part`), after whatever a stage has raised."""

    def __init__(self, search: PartitionedSearch, begin: Callable[[], PassRows]) -> None:
        self._search = search
        self._begin = begin
        self._rows: PassRows | None = None
        self._walk = PartitionWalk(search)
        self._number = 0
        self._over = False

    @property
    def rows(self) -> PassRows:
        if self._rows is None:
            self._rows = self._begin()
            self._search._begun()
        return self._rows

    @property
    def joinable(self) -> bool:
        """A partition has been read since queries joined: if they join no sooner, the others go on."""
        return self._walk.moved

    def __next__(self) -> Stage:
        if self._over:
            raise StopIteration
        rows = self.rows
        if len(rows.needed):
            self._search._advance(rows, self._walk)
        held, needed = self._search._held, rows.needed.tolist()
        left = sum(partition not in held for partition in needed) + any(partition in held for partition in needed)
        self._number += 1
        self._over = not left
        return self._stage(left)

    def join(self, parts: Sequence[PassRows]) -> None:
        """Queries of other searches go on with this pass, between two stages. Their rows follow those that are here;
        what they need of the partitions passed before comes when the pass has gone around. Results are those of a pass
        of their own. Raises ValueError for another k or number of clusters."""
        self._rows = PassRows.join([self.rows, *parts])
        self._walk.moved = False
        self._over = False

    def keep(self, chosen: Sequence[int]) -> None:
        """Go on with these queries alone, whose rows are renumbered."""
        self._rows = self.rows.part(chosen)

    def close(self) -> None:
        """Give back what has been read ahead."""
        self._over = True
        self._walk.drop()

    def _stage(self, left: int) -> Stage:
        index = self._search._file.index
        distances, ids = self.rows.results(similarity=index.similarity)
        return Stage(self._number, self._number + left, index.core.ids(ids), distances)


class PartitionWalk:
    """Where a pass stands, and at most one partition ahead of it, read while another is scanned. `moved`: a partition
    has been read since queries joined."""

    def __init__(self, search: PartitionedSearch) -> None:
        self.moved = True
        self._search = search
        self._place = 0
        self._partition = -1
        self._reading: Future[PartitionLists] | None = None

    def order(self, needed: NDArray[np.intp]) -> list[int]:
        """Sorted partitions from here on, and around."""
        ordered: list[int] = [*needed[needed >= self._place].tolist(), *needed[needed < self._place].tolist()]
        return ordered

    def begin(self, partition: int) -> None:
        """Read it ahead."""
        if self._search._reader is None or self._partition == partition:
            return
        self.drop()
        with suppress(RuntimeError):
            # The search is being closed.
            self._reading = self._search._reader.submit(self._search._read, partition)
            self._partition = partition

    def take(self, partition: int) -> PartitionLists:
        """Raises what reading has raised; the next call reads again."""
        if self._partition != partition or self._reading is None:
            self.drop()
            return self._search._read(partition)
        reading, self._reading, self._partition = self._reading, None, -1
        return reading.result()

    def go_on(self, read: int | None, others: Sequence[int]) -> None:
        """The residents, or the partition that was read, have been scanned; `others` are still needed."""
        self.moved |= read is not None
        if others:
            # It is being read: queries that join begin with it.
            self._place = others[0]
        elif read is not None:
            self._place = read + 1

    def drop(self) -> None:
        reading, self._reading, self._partition = self._reading, None, -1
        if reading is not None:
            reading.cancel()
