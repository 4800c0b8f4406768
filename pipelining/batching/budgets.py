"""Budgets of memory that a placement must stay within (RAGDoll Eq. 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ragorder.counts import parse_size
from ragorder.pipelining.batching.machine import device_memory, disk_memory, host_memory

__all__ = ["Budgets", "format_bytes"]


@dataclass(frozen=True, slots=True, init=False)
class Budgets:
    """Bytes that may be taken on the device, in host memory and on the disk, the latter for KV alone: weights and index
    are read from their own files, and never written.

        Budgets("6GiB", "24GiB", disk_bytes="100GiB")

    `unified`: the device computes in host memory, as a CPU does; all that lies on either is within `host_bytes`. Raises
    ValueError for sizes that are negative or unreadable.
    """

    device_bytes: int
    host_bytes: int
    disk_bytes: int
    unified: bool

    def __init__(
        self, device_bytes: int | str, host_bytes: int | str, disk_bytes: int | str = 0, *, unified: bool = False
    ) -> None:
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        for name, size in sizes.items():
            object.__setattr__(self, name, _parsed(name, size))
        object.__setattr__(self, "unified", unified)

    @classmethod
    def of_this_machine(cls, folder: Path | str = ".", share: float = 0.9) -> Self:
        """`share` of what is free: the first GPU's memory, RAM within the limits of the control group and RLIMIT_AS,
        and the disk of `folder`. Without a GPU the device is a CPU. Raises ImportError without psutil."""
        if not 0 < share <= 1:
            raise ValueError(f"share is above 0 and at most 1, got {share}")
        host, gpu = host_memory(), device_memory()
        sizes = [math.floor(share * size) for size in (host if gpu is None else gpu, host, disk_memory(folder))]
        return cls(*sizes, unified=gpu is None)

    def changed(
        self, *, device_bytes: int | None = None, host_bytes: int | None = None, disk_bytes: int | None = None
    ) -> Self:
        """The same with other sizes."""
        return type(self)(
            self.device_bytes if device_bytes is None else device_bytes,
            self.host_bytes if host_bytes is None else host_bytes,
            self.disk_bytes if disk_bytes is None else disk_bytes,
            unified=self.unified,
        )


def format_bytes(size: int) -> str:
    """A size for reading: 5.8 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size} B"


def _parsed(name: str, size: int | str) -> int:
    if isinstance(size, str):
        try:
            return parse_size(size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(f"{name} is {size!r}: give 0 or more bytes, as a whole number or as text such as 6GiB")
    return size
