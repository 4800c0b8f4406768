"""Sizes of an index file, by what stays in memory and what may."""

from __future__ import annotations

import os
from pathlib import Path

from ragorder.pipelining.placement import IndexSizes
from ragorder.pipelining.search.partition_file import PartitionFile

__all__ = ["index_sizes"]

_SEARCHER = "a placement"


def index_sizes(path: Path | str, partitions: int = 32) -> IndexSizes:
    """Of an index written by FAISS. An IVF index is cut into `partitions` (at most one a cluster), as
    `PartitionedSearch` does; any other one is in memory as a whole.

    Raises ImportError, OSError, and ValueError for a file that is no index, or for less than one partition.
    """
    if partitions < 1:
        raise ValueError(f"partitions must be 1 or more, got {partitions}")
    whole = os.path.getsize(path)
    try:
        # One partition is always there, and the number of clusters is read then.
        one = _cut(path, 1)
        one.close()
        file = _cut(path, min(partitions, one.index.ivf.nlist))
    except TypeError:
        return IndexSizes(fixed=whole)
    try:
        sizes = tuple(int(size) for size in file.partition_bytes)
        inside = os.path.samefile(file.path, path)
    finally:
        file.close()
    return IndexSizes(fixed=max(0, whole - sum(sizes)) if inside else whole, partitions=sizes)


def _cut(path: Path | str, count: int) -> PartitionFile:
    return PartitionFile(path, count, searcher=_SEARCHER)
