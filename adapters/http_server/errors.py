"""HTTP errors as JSON, and their middleware."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragorder.errors import RagorderError

_logger = logging.getLogger("ragorder")


class HTTPError(RagorderError):
    """An error that the server answers itself. `message` says what to change, without quoting a prompt; `param` names a
    field of the body. `content` is in OpenAI's format."""

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
        self.content: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    async def send(self, send: Send, content: dict[str, Any] | None = None) -> None:
        body = json.dumps(self.content if content is None else content).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self.headers]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class ErrorMiddleware:
    """Outermost ASGI layer, which answers with the error. A begun answer is cut off instead: it must not look complete.
    `shape(path, error)` returns the content in the path's API."""

    def __init__(self, app: ASGIApp, shape: Callable[[str, HTTPError], dict[str, Any]] | None = None) -> None:
        self._app = app
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def record(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1003, "reason": "no WebSocket here"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            await self._app(scope, receive, record)
            return
        except HTTPError as error:
            # An error raised in a thread and its traceback refer to each other, and would keep the body in memory.
            answer = error.with_traceback(None)
            answer.__context__ = None
        except Exception as error:
            # An error's message may quote a prompt: only its type is logged.
            _logger.error("the server failed with %s", type(error).__name__)
            answer = HTTPError(500, "The server failed: its log has the type of the error.", code="proxy_error")
        if begun:
            # Clients must not be able to fill the log.
            level = logging.WARNING if answer.status >= 500 else logging.INFO
            _logger.log(level, "an answer was cut off: %s", answer.code)
        else:
            await answer.send(send, None if self._shape is None else self._shape(scope["path"], answer))
