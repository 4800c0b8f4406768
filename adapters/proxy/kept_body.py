"""A request's bytes, from their arrival until the server answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial

from ragorder.adapters.http_server.request_body import MemoryShare
from ragorder.adapters.http_server.untrusted_json import VALUE_BYTES
from ragorder.adapters.proxy.bodies.body import Route
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.adapters.proxy.bodies.parsing import BodyParser
from ragorder.adapters.proxy.workers import Workers

# Bytes of a body sent at a time, so that a long one is not copied whole.
_PIECE = 1 << 18


class KeptBody:
    """Owner of a request's bytes, of what was parsed of them, and of their share of the memory budget.

    Others borrow them for one call: a copy that they kept would stay as long as the answer.
    """

    def __init__(self, received: bytes, share: MemoryShare) -> None:
        self.received = received
        self.parsed: ParsedBody | None = None
        self._share = share
        # Whether every replica gets the same bytes.
        self._is_final = False

    async def parse(self, parser: BodyParser, route: Route | None, workers: Workers) -> None:
        """Parse the received bytes, again before each order: ordering changes what was parsed. Without documents to
        order this is done once, since it also counts the request."""
        if route is None or self._is_final:
            return
        work = partial(_parse, parser, route, self.received)
        self.parsed, size = await workers.run(work, len(self.received))
        self._share.resize(size)
        self._is_final = self.parsed is None or (self.parsed.left is not None and not self.parsed.named)

    def send(self, body: bytes, *, again: bool = False) -> tuple[int, AsyncIterator[bytes]]:
        """Return the length and the pieces of the ordered `body`, which free it at their end.

        The received bytes stay only if they may be sent `again`. Raises HTTPError if the memory does not suffice.
        """
        self.parsed = None
        if not again:
            self.received = b""
        elif self._is_final:
            # Its tools may be sorted.
            self.received = body
        # Without documents it is the received body.
        self._share.resize(len(self.received) + (0 if body is self.received else len(body)))
        return len(body), self._pieces(body)

    def free(self) -> None:
        """Drop the received bytes, once an answer has begun."""
        self.received = b""
        self._share.resize(0)

    async def _pieces(self, body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), _PIECE):
            yield body[start : start + _PIECE]
        del body
        self._share.resize(len(self.received))


def _parse(parser: BodyParser, route: Route, received: bytes) -> tuple[ParsedBody | None, int]:
    """Return the body with documents, if any, and the bytes that both take."""
    parsed = parser.parse(route, received)
    if parsed is None:
        return None, len(received)
    # CPython stores a text as wide as its widest character.
    width = 1 if received.isascii() and b"\\u" not in received else 4
    return parsed, len(received) * (1 + width) + parsed.values * VALUE_BYTES
