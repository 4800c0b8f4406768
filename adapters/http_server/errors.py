"""Errors of the proxy's own, in the format of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Sequence

from starlette.types import Send

__all__ = ["ProxyError"]


class ProxyError(Exception):
    """The proxy's own answer to a request that is not passed on, or that the upstream server did not answer.

    `message` says what is wrong and what to change; `param` names the field of the body. Nothing of a prompt is in it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status = status
        self.code = code
        self.headers = headers
        self.content = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    async def send(self, send: Send) -> None:
        """Answer with it."""
        body = json.dumps(self.content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
