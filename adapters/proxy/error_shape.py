"""The proxy's own errors, in the protocol of the route."""

from __future__ import annotations

import json
from typing import Any

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.parsed import Route

__all__ = ["error_content", "error_event"]

_MESSAGES = "/v1/messages"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_content(path: str, error: HTTPError) -> dict[str, Any]:
    """The body of an error: Anthropic's on its routes, OpenAI's on all others."""
    return _of_messages(error) if path == _MESSAGES or path.startswith(f"{_MESSAGES}/") else error.content


def error_event(route: Route | None, error: HTTPError) -> bytes:
    """The same as the last event of a stream."""
    name, content = b"", error.content
    if route == "messages":
        name, content = b"event: error\n", _of_messages(error)
    elif route == "responses":
        fields: dict[str, Any] = error.content["error"]
        name, content = b"event: error\n", {**fields, "type": "error", "sequence_number": 0}
    return name + b"data: " + json.dumps(content).encode() + b"\n\n"


def _of_messages(error: HTTPError) -> dict[str, Any]:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}
