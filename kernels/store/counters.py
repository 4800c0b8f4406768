"""Counters of a store."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["StoreCounters"]


@dataclass(slots=True)
class StoreCounters:
    """Chunks since the store was opened with `restored` chunks.

    `refused` chunks leave the store, except another model's ("identity"). "foreign": another chunk; "size": unlike the
    buffer's; "room": no room for the write. `skipped_writes` came during `pauses`. Failures are by the system error's
    name.
    """

    restored: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    skipped_writes: int = 0
    pauses: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failed_reads: Counter[str] = field(default_factory=Counter)
    failed_writes: Counter[str] = field(default_factory=Counter)

    def failed_read(self, error: OSError) -> None:
        self.failed_reads[_name(error)] += 1

    def failed_write(self, error: OSError) -> None:
        self.failed_writes[_name(error)] += 1

    def refusals(self) -> dict[str, int]:
        found = dict(self.refused)
        if self.skipped_writes:
            found["paused"] = self.skipped_writes
        found |= {f"read_{name}": count for name, count in dict(self.failed_reads).items()}
        return found | {f"write_{name}": count for name, count in dict(self.failed_writes).items()}


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "unknown")
