"""Search of an index on disk (RAGDoll 4.2)."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.batching.partition_file import PartitionFile, PartitionLists
from ragorder.pipelining.batching.pass_rows import PassRows
from ragorder.pipelining.search.costs import ClusterCosts
from ragorder.pipelining.search.scanner import PieceScanner, one_thread
from ragorder.pipelining.staged import Stage
from ragorder.pipelining.staged._faiss import load_faiss, read_k, read_queries
from ragorder.pipelining.staged._ivf import read_nprobe

# A resident partition stays unless another is used this much more: an exchange saves nothing by itself.
_STAY = 1.1
# The weight of a use halves after 64 searches.
_DECAY = 0.5 ** (1 / 64)
_CODE_S = 1e-8


class PartitionedSearch:
    """Searches an IVF index that stays on disk; a batch of queries passes over its partitions once.

        search = PartitionedSearch("index.faiss", partitions=32, resident=8)
        for stage in search.search(queries, k=5): ...      # a StagedSearch; the last stage equals index.search

    - `partitions`: ranges of clusters of about equal bytes
    - `resident`: most used partitions that stay in memory
    - `nprobe`, `cores`: default to the index's and FAISS's own
    - `read_ahead`: read the next partition during a scan; memory then has two beside the resident ones
    - `drop_pages`: from the operating system's cache once read

    The first stage scans the resident partitions, each later one another. Queries may join between stages
    (`PartitionedPass.join`). After an OSError or MemoryError the next stage continues with the same partition. Searches
    may run concurrently.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        partitions: int = 32,
        *,
        resident: int = 0,
        nprobe: int | None = None,
        cores: int | None = None,
        read_ahead: bool = True,
        drop_pages: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._nprobe = read_nprobe(nprobe)
        cores = load_faiss().omp_get_max_threads() if cores is None else cores
        if cores < 1:
            raise ValueError(f"cores must be at least 1, got {cores}")
        self._file = PartitionFile(path, partitions, searcher="PartitionedSearch", drop_pages=drop_pages)
        self._resident = 0
        try:
            self._check_resident(resident)
        except ValueError:
            self._file.close()
            raise
        self._resident = resident
        self.read_bytes = 0
        self._held: dict[int, PartitionLists] = {}
        self._uses = np.zeros(self._file.count + 1)
        self._scanner = PieceScanner(self._file.index, cores, ClusterCosts(_CODE_S), clock)
        self._reader = ThreadPoolExecutor(1, "ragorder-partitions") if read_ahead else None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def partitions(self) -> int:
        return self._file.count

    @property
    def partition_bytes(self) -> Sequence[int]:
        sizes: list[int] = self._file.partition_bytes.tolist()
        return sizes

    @property
    def resident(self) -> int:
        return self._resident

    @property
    def held(self) -> Sequence[int]:
        return sorted(self._held)

    @property
    def held_bytes(self) -> int:
        return sum(lists.read_bytes for lists in tuple(self._held.values()))

    @property
    def similarity(self) -> bool:
        return self._file.index.similarity

    def search(self, queries: Any, k: int) -> PartitionedPass:
        """See `StagedSearch.search`. Raises ValueError if `max_codes` or `parallel_mode` exclude stages."""
        index = self._file.index
        # The caller may change its array during the pass.
        k, rows = read_k(k), read_queries(queries, index.core.outer.d).copy()
        index.check_settings()
        self._check_open()
        nprobe, slices = index.nprobe(self._nprobe), index.slices(len(rows))

        def begin() -> PassRows:
            transformed = index.core.transform_queries(rows)
            return PassRows.begin(k, transformed, *index.nearest_clusters(transformed, nprobe, slices), self._file)

        return PartitionedPass(self, begin)

    def resume(self, parts: Sequence[PassRows]) -> PartitionedPass:
        if not parts:
            raise ValueError("a pass has at least one query")
        return PartitionedPass(self, lambda: PassRows.join(parts))

    def resize(self, resident: int) -> None:
        """Set the most partitions in memory, freeing the least used ones. Waits for the running stage."""
        self._check_resident(resident)
        with self._lock:
            self._resident = resident
            before = len(self._held)
            while len(self._held) > resident:
                self._drop_least()
            dropped = before > len(self._held)
        if dropped:
            _trim_memory()

    def relieve(self) -> bool:
        with self._lock:
            if not self._held:
                return False
            self._drop_least()
            self._resident = min(self._resident - 1, len(self._held))
        _trim_memory()
        return True

    def close(self) -> None:
        """End after the running scan; reads and later stages raise RuntimeError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        with self._lock:
            self._held.clear()
            self._file.close()
            self._scanner.close()
        _trim_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_resident(self, resident: int) -> None:
        if not 0 <= resident <= self._file.count:
            raise ValueError(f"resident must be 0 to {self._file.count}, the partitions, got {resident}")

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this search is closed")

    def _drop_least(self) -> None:
        del self._held[min(self._held, key=self._uses.__getitem__)]

    def _advance(self, rows: PassRows, walk: _Walk) -> None:
        with self._lock:
            self._check_open()
            needed = walk.order(rows.needed)
            chosen = {partition: self._held[partition] for partition in needed if partition in self._held}
            others = [partition for partition in needed if partition not in chosen]
        read: int | None = None
        if not chosen:
            read = others.pop(0)
            try:
                chosen[read] = walk.take(read)
            except Exception:
                # If the search was closed meanwhile, the error is not the disk's.
                self._check_open()
                raise
        if others:
            walk.begin(others[0])
        with self._lock:
            self._check_open()
            self._scan(rows, chosen)
            walk.go_on(read, others)
            kept = all(self._keep(partition, lists) for partition, lists in chosen.items())
            chosen.clear()
        if not kept:
            _trim_memory()

    def _scan(self, rows: PassRows, chosen: dict[int, PartitionLists]) -> None:
        file = self._file
        partitions = np.zeros(file.count + 1, np.bool_)
        partitions[list(chosen)] = True
        visits = rows.visits(partitions, file.sizes)
        file.show(chosen)
        try:
            with one_thread():
                best = rows.best
                if len(visits.rows):
                    best = self._scanner.scan_visits(visits, rows.queries, best)
                candidates = rows.find_ties(partitions, file)
        finally:
            file.show({})
        rows.scanned(partitions, best, candidates)
        np.add.at(self._uses, file.home[visits.clusters], visits.codes)

    def _keep(self, partition: int, lists: PartitionLists) -> bool:
        if partition in self._held or not self._resident:
            return partition in self._held
        if len(self._held) >= self._resident:
            least = min(self._held, key=self._uses.__getitem__)
            if self._uses[partition] <= _STAY * self._uses[least]:
                return False
            del self._held[least]
        self._held[partition] = lists
        return True

    def _begun(self) -> None:
        with self._lock:
            self._uses *= _DECAY

    def _read(self, partition: int) -> PartitionLists:
        lists = self._file.read(partition)
        self.read_bytes += lists.read_bytes
        return lists


class PartitionedPass(Iterator[Stage]):
    """The stages of one search. `rows` are a checkpoint after any error of a stage."""

    def __init__(self, search: PartitionedSearch, begin: Callable[[], PassRows]) -> None:
        self._search = search
        self._begin = begin
        self._rows: PassRows | None = None
        self._walk = _Walk(search)
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
        """Whether a partition has been read since queries last joined."""
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
        """Join queries of other searches, with the same k and nprobe, between two stages."""
        self._rows = PassRows.join([self.rows, *parts])
        self._walk.moved = False
        self._over = False

    def keep(self, chosen: Sequence[int]) -> None:
        self._rows = self.rows.part(chosen)

    def close(self) -> None:
        self._over = True
        self._walk.drop()

    def _stage(self, left: int) -> Stage:
        index = self._search._file.index
        distances, ids = self.rows.results(similarity=index.similarity)
        return Stage(self._number, self._number + left, index.core.ids(ids), distances)


class _Walk:
    """Reads at most one partition during a scan."""

    def __init__(self, search: PartitionedSearch) -> None:
        self.moved = True
        self._search = search
        self._next = 0
        self._partition = -1
        self._reading: Future[PartitionLists] | None = None

    def order(self, needed: NDArray[np.intp]) -> list[int]:
        ordered: list[int] = [*needed[needed >= self._next].tolist(), *needed[needed < self._next].tolist()]
        return ordered

    def begin(self, partition: int) -> None:
        if self._search._reader is None or self._partition == partition:
            return
        self.drop()
        with suppress(RuntimeError):
            # The search is being closed.
            self._reading = self._search._reader.submit(self._search._read, partition)
            self._partition = partition

    def take(self, partition: int) -> PartitionLists:
        """Raise what reading raised, and read again at the next call."""
        if self._partition != partition or self._reading is None:
            self.drop()
            return self._search._read(partition)
        reading, self._reading, self._partition = self._reading, None, -1
        return reading.result()

    def go_on(self, read: int | None, others: Sequence[int]) -> None:
        self.moved |= read is not None
        if others:
            # It is being read: queries that join begin with it.
            self._next = others[0]
        elif read is not None:
            self._next = read + 1

    def drop(self) -> None:
        reading, self._reading, self._partition = self._reading, None, -1
        if reading is not None:
            reading.cancel()


def _trim_memory() -> None:
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
