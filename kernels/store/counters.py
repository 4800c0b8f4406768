"""Counters of a store."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

__all__ = ["StoreCounters"]


@dataclass(slots=True)
class StoreCounters:
    """Chunks since the store was opened with `restored` chunks.

    A refused chunk leaves the store: `identity` (another model's; the file stays), `checksum`, `truncated`, `format`
    (another version), `foreign` (another chunk), `missing` (no file) or `size` (unlike the buffer's). `refused_room`
    counts writes that did not fit, `skipped_writes` writes during `pauses`. Failures are counted by the system error's
    name (ENOSPC…).
    """

    restored: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    refused_identity: int = 0
    refused_checksum: int = 0
    refused_truncated: int = 0
    refused_format: int = 0
    refused_foreign: int = 0
    refused_missing: int = 0
    refused_size: int = 0
    refused_room: int = 0
    skipped_writes: int = 0
    pauses: int = 0
    failed_reads: dict[str, int] = field(default_factory=dict)
    failed_writes: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        name = f"refused_{reason}"
        setattr(self, name, getattr(self, name) + 1)

    def failed_read(self, error: OSError) -> None:
        _count(self.failed_reads, error)

    def failed_write(self, error: OSError) -> None:
        _count(self.failed_writes, error)

    def refusals(self) -> dict[str, int]:
        """Return counts of chunks not stored or returned, by reason. Other threads may count meanwhile."""
        found = {
            "identity": self.refused_identity,
            "checksum": self.refused_checksum,
            "truncated": self.refused_truncated,
            "format": self.refused_format,
            "foreign": self.refused_foreign,
            "missing": self.refused_missing,
            "size": self.refused_size,
            "room": self.refused_room,
            "paused": self.skipped_writes,
        }
        found |= {f"read_{name}": count for name, count in self.failed_reads.copy().items()}
        found |= {f"write_{name}": count for name, count in self.failed_writes.copy().items()}
        return {reason: count for reason, count in found.items() if count}


def _count(failures: dict[str, int], error: OSError) -> None:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    failures[name] = failures.get(name, 0) + 1
