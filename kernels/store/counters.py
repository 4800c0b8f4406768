"""What a store has done and refused."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

__all__ = ["StoreCounters"]


@dataclass(slots=True)
class StoreCounters:
    """In chunks, since the store was opened.

    `restored` were found when it was opened; `stored` were written, `hits` read and found right, `misses` asked for in
    vain, `evicted` given up for others.

    Refused, and no longer in the store: `refused_identity` are another model's (their files stay), `refused_checksum`
    have changed, `refused_truncated` are shorter or longer than they were, `refused_foreign` are no chunk of a store at
    all, or another one than their name says, `refused_missing` are gone from the folder, `refused_size` do not fit the
    reader's buffer. `failed_reads` and `failed_writes` are what the system did not do, by its names for why (ENOSPC,
    EIO, EROFS...).

    Not written: `refused_room`, as what may go would not make room; `skipped_writes`, as writing paused. `pauses`
    counts how often it did.
    """

    restored: int = 0
    stored: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    refused_identity: int = 0
    refused_checksum: int = 0
    refused_truncated: int = 0
    refused_foreign: int = 0
    refused_missing: int = 0
    refused_size: int = 0
    refused_room: int = 0
    skipped_writes: int = 0
    pauses: int = 0
    failed_reads: dict[str, int] = field(default_factory=dict)
    failed_writes: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        """Count a chunk as refused for one of the reasons above."""
        name = f"refused_{reason}"
        setattr(self, name, getattr(self, name) + 1)

    def failed_read(self, error: OSError) -> None:
        _count(self.failed_reads, error)

    def failed_write(self, error: OSError) -> None:
        _count(self.failed_writes, error)

    def refusals(self) -> dict[str, int]:
        """All that was not taken or not given back, by reason. Other threads may count meanwhile."""
        found = {
            "identity": self.refused_identity,
            "checksum": self.refused_checksum,
            "truncated": self.refused_truncated,
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
