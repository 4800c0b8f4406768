"""A request with documents, as it is sent."""

from __future__ import annotations

from collections.abc import Sequence

from ragorder.adapters.http_server.headers import Headers, without

__all__ = ["SentRequest", "ranks_value"]

_LONGEST = 1024


def ranks_value(ranks: Sequence[int]) -> bytes | None:
    """Ranks as the value of a header; None if it would be too long for one."""
    value = ",".join(map(str, ranks)).encode()
    return value if len(value) <= _LONGEST else None


class SentRequest:
    """Headers on the way to the server; body and answer as they are. `end` is called once the answer has ended."""

    complete = False
    """Set by the proxy when the answer was forwarded to its end."""

    def __init__(self, added: Headers | None = None) -> None:
        self.added = added or []

    def take_body(self, received: bytes = b"") -> bytes:
        """The body to send, once: none is kept while the answer comes."""
        return received

    def request_headers(self, received: Headers) -> Headers:
        """Added headers replace the client's."""
        for name, _ in self.added:
            received = without(received, name)
        return [*received, *self.added]

    def headers(self) -> Headers:
        """Those added to the answer."""
        return []

    def begin(self, status: int, headers: Headers) -> None:
        """The head of the answer."""

    def feed(self, chunk: bytes) -> None:
        """A piece of the answer."""

    def end(self) -> None:
        """Idempotent."""
