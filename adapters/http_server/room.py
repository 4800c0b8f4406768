"""The memory that the bodies of all requests may take together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ragorder.adapters.http_server.errors import ProxyError

__all__ = ["Held", "Room"]


class Room:
    """Room for `limit` bytes of bodies. One body alone is always taken, however large it is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def hold(self) -> Iterator[Held]:
        """What one request holds, given back at the end of the block."""
        held = Held(self)
        try:
            yield held
        finally:
            held.keep(0)


class Held:
    """Of a room, the bytes that one request holds."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._bytes = 0

    def keep(self, count: int) -> None:
        """Hold `count` bytes from now on, instead of those before. Raises ProxyError where there is no room."""
        more = count - self._bytes
        if more > 0 and self._room.taken + more > self._room.limit and self._room.taken > self._bytes:
            raise ProxyError(
                503,
                f"The bodies of other requests take up the {self._room.limit >> 20:,} MiB that there are for them "
                "(--bodies-limit): try again later.",
                code="no_room_for_body",
                headers=[(b"retry-after", b"1"), (b"connection", b"close")],
            )
        self._room.taken += more
        self._bytes = count

    def add(self, count: int) -> None:
        """Hold `count` bytes more. Raises ProxyError where there is no room."""
        self.keep(self._bytes + count)
