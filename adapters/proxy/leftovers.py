"""Whether a server has sent more than its answer."""

from __future__ import annotations

from typing import Any

import httpx

__all__ = ["has_leftovers"]


def has_leftovers(transport: httpx.AsyncBaseTransport) -> bool:
    """Whether a connection that waits for its next request has bytes that were read and belong to no answer.

    Those that still come are seen by the pool, which takes no connection whose socket is readable. There is no public
    way to those that are here already; a connection that cannot be looked into counts as having some.
    """
    if not isinstance(transport, httpx.AsyncHTTPTransport):
        return False
    try:
        connections: list[Any] = transport._pool.connections
        return any(_read_ahead(connection._connection) for connection in connections)
    except AttributeError:
        return True


def _read_ahead(connection: Any) -> bool:
    if connection._h11_state.trailing_data[0]:
        return True
    stream = connection._network_stream._stream
    if (below := getattr(stream, "transport_stream", None)) is not None:
        if stream._ssl_object.pending() or stream._read_bio.pending:
            return True
        stream = below
    return bool(stream._protocol.read_queue)
