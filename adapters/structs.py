"""msgspec structs for concurrent readers."""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")


def readable_by_threads(kind: type[T]) -> type[T]:
    """Return the struct with its fields resolved. msgspec (0.22) does so at its first use, and two threads at once
    crash or hang the process."""
    msgspec.json.Decoder(kind)
    return kind
