"""The address of a request, as it goes on to the upstream server."""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from starlette.types import Scope

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.http_server.headers import header

__all__ = ["target_of"]

_BETWEEN = re.compile(rb"[/\\]")
_DOTS = (b".", b"..")


def target_of(scope: Scope) -> bytes:
    """Path and query as they came. Raises ProxyError for what is no path, for one that leads out of the path of the
    upstream address, and for WebSocket."""
    path: bytes = scope["raw_path"]
    if not path.startswith(b"/"):
        raise ProxyError(400, "The address of a request must be a path.", code="invalid_http")
    # Servers differ in what they take for a separator, and for a parameter of a segment.
    segments = _BETWEEN.split(unquote_to_bytes(path))
    if any(segment.partition(b";")[0] in _DOTS for segment in segments):
        message = "The path must not have . or .. between slashes: send the path that is meant."
        raise ProxyError(400, message, code="invalid_path")
    if (header(scope["headers"], b"upgrade") or b"").lower() == b"websocket":
        raise ProxyError(400, "WebSocket is not passed on.", code="no_websocket")
    return path + b"?" + scope["query_string"] if scope["query_string"] else path
