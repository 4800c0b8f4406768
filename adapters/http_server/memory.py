"""Limit on the memory of all request bodies together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ragorder.adapters.http_server.errors import HTTPError

__all__ = ["MemoryBudget", "MemoryShare"]


class MemoryBudget:
    """At most `limit` bytes of bodies; a single body is always admitted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        share = MemoryShare(self)
        try:
            yield share
        finally:
            share.resize(0)


class MemoryShare:
    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def resize(self, count: int) -> None:
        """Raises HTTPError if the budget is exhausted."""
        more = count - self._bytes
        if more > 0 and self._budget.used + more > self._budget.limit and self._budget.used > self._bytes:
            raise HTTPError(
                503,
                f"The bodies of other requests fill the {self._budget.limit >> 20:,} MiB for request bodies "
                "(--bodies-limit): try again later.",
                code="no_room_for_body",
                headers=[(b"retry-after", b"1"), (b"connection", b"close")],
            )
        self._budget.used += more
        self._bytes = count

    def add(self, count: int) -> None:
        self.resize(self._bytes + count)
