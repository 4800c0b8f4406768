"""Partitions of an index file (RAGDoll 4.2)."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragorder.pipelining.staged._faiss import load_faiss
from ragorder.pipelining.staged._ivf import ClusterIndex

_ID_BYTES = 8


class PartitionLists(NamedTuple):
    invlists: Any
    read_bytes: int


class PartitionFile:
    """An IVF index on disk, its clusters cut into `count` ranges of about equal bytes.

    Lists are read, not mapped: a failing disk raises OSError instead of ending the process.
    """

    def __init__(self, path: str | os.PathLike[str], count: int, *, searcher: str, drop_pages: bool = True) -> None:
        index = _open_index(path, searcher)
        self.index = ClusterIndex(index, searcher)
        ivf, faiss = self.index.ivf, load_faiss()
        if not ivf.is_trained:
            raise ValueError(f"the {type(ivf).__name__} in {path} is not trained: train it, add its vectors, write it")
        if not 1 <= count <= ivf.nlist:
            raise ValueError(f"partitions must be 1 to {ivf.nlist}, the clusters of {path}, got {count}")
        lists = faiss.downcast_InvertedLists(ivf.invlists)
        if not isinstance(lists, faiss.OnDiskInvertedLists):
            raise TypeError(
                f"{searcher} reads inverted lists from a file, but those of {path} are {type(lists).__name__}: write "
                "the index with plain lists"
            )
        self.count = count
        self.code_size = int(lists.code_size)
        self.path = _lists_file(path, lists.filename)
        lists_at = [lists.lists.at(number) for number in range(ivf.nlist)]
        self._sizes = np.array([each.size for each in lists_at], np.int64)
        self._capacities = np.array([each.capacity for each in lists_at], np.int64)
        self._offsets = [int(each.offset) for each in lists_at]
        del lists_at
        self._check_whole(path)
        # The last element is for cluster -1, which means no cluster.
        self.sizes = np.append(self._sizes, 0)
        self.bounds = _cut(self._sizes, count)
        self.home = np.append(np.repeat(np.arange(count), np.diff(self.bounds)), count)
        self.partition_bytes = np.add.reduceat(self._sizes, self.bounds[:-1]) * (self.code_size + _ID_BYTES)
        self._drop_pages = drop_pages
        self._none = [faiss.ArrayInvertedLists(int(width), self.code_size) for width in np.diff(self.bounds)]
        self._stack: Any = None
        self._file: int | None = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        # FAISS's mapping ends with its own lists.
        self.show({})

    def read(self, partition: int) -> PartitionLists:
        faiss = load_faiss()
        first, last = int(self.bounds[partition]), int(self.bounds[partition + 1])
        lists, total = faiss.ArrayInvertedLists(last - first, self.code_size), 0
        for number, cluster in enumerate(range(first, last)):
            size = int(self._sizes[cluster])
            if not size:
                continue
            lists.resize(number, size)
            codes = faiss.rev_swig_ptr(lists.get_codes(number), size * self.code_size)
            ids = faiss.rev_swig_ptr(lists.get_ids(number), size)
            start = self._offsets[cluster]
            self._fill(codes, start)
            self._fill(ids.view(np.uint8), start + int(self._capacities[cluster]) * self.code_size)
            total += codes.nbytes + ids.nbytes
        return PartitionLists(lists, total)

    def show(self, loaded: Mapping[int, PartitionLists]) -> None:
        faiss = load_faiss()
        parts = faiss.InvertedListsPtrVector()
        for partition, none in enumerate(self._none):
            parts.push_back(loaded[partition].invlists if partition in loaded else none)
        stack = faiss.VStackInvertedLists(parts.size(), parts.data())
        self.index.ivf.replace_invlists(stack)
        # The former stack is in use up to here.
        self._stack = stack

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _check_whole(self, path: str | os.PathLike[str]) -> None:
        lists = zip(self._offsets, self._capacities.tolist(), self._sizes.tolist(), strict=True)
        ends = (start + capacity * self.code_size + size * _ID_BYTES for start, capacity, size in lists if size)
        missing = max(ends, default=0) - os.path.getsize(self.path)
        if missing > 0:
            raise ValueError(
                f"{self.path} is cut off: {missing} bytes of the inverted lists of {path} are missing: copy it again"
            )

    def _fill(self, buffer: NDArray[np.uint8], offset: int) -> None:
        if self._file is None:
            raise ValueError("this index file is closed")
        left = memoryview(buffer)  # type: ignore[arg-type]
        start = offset
        while left:
            count = os.preadv(self._file, [left], offset)
            if not count:
                raise OSError(f"{self.path.name} ends before its inverted lists do: it has been cut off")
            left, offset = left[count:], offset + count
        if self._drop_pages and hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(self._file, start, offset - start, os.POSIX_FADV_DONTNEED)


def _open_index(path: str | os.PathLike[str], searcher: str) -> Any:
    faiss = load_faiss()
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{searcher} searches an index file, got {type(path).__name__}: write it with faiss.write_index, and pass "
            "its path"
        )
    with open(path, "rb"):
        # Raises an OSError with the file's name instead of FAISS's RuntimeError.
        pass
    try:
        return faiss.read_index(os.fspath(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        if "could not load ArrayInvertedLists" in str(error):
            raise TypeError(
                f"the inverted lists in {path} are of a kind that cannot be read in parts: use IndexIVFFlat, "
                "IndexIVFPQ or IndexIVFScalarQuantizer"
            ) from error
        size = os.path.getsize(path)
        raise ValueError(
            f"FAISS cannot open {path} as an index ({size} bytes): {_reason(error)}: give a whole file written by "
            "faiss.write_index"
        ) from error


def _lists_file(path: str | os.PathLike[str], filename: str) -> Path:
    lists = Path(filename or path)
    if lists.exists():
        return lists
    beside = Path(path).with_name(lists.name)
    if beside.exists():
        return beside
    raise FileNotFoundError(
        f"the inverted lists of {path} are in {lists}, which does not exist, nor does {beside}: put the file there"
    )


def _reason(error: RuntimeError) -> str:
    return re.sub(r"^Error in .*? at \S+:\d+: ", "", str(error)).partition("\n")[0][:200]


def _cut(sizes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    total = np.cumsum(sizes)
    bounds = [0]
    for number in range(1, count):
        wanted = int(np.searchsorted(total, total[-1] * number / count, side="left")) + 1
        bounds.append(min(max(wanted, bounds[-1] + 1), len(sizes) - (count - number)))
    return np.array([*bounds, len(sizes)], np.int64)
