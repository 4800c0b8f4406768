"""Log line for each answer."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["AccessLog"]

_logger = logging.getLogger("ragorder.access")
_LONGEST_PATH = 200


class AccessLog:
    """ASGI layer that logs method, path, status, and seconds until the answer has ended; nothing of a body, a header or
    a query."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, ended, start = 0, False, time.perf_counter()

        async def watch(message: Message) -> None:
            nonlocal status, ended
            status = message.get("status", status)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watch)
        finally:
            # Percent-encoded, so that no path makes its own line.
            path = scope["raw_path"][:_LONGEST_PATH].decode("ascii", "backslashreplace")
            seconds = time.perf_counter() - start
            broken = "" if ended else " (cut off)" if status else " (no answer)"
            _logger.info("%s %s %s %.3f s%s", scope["method"], path, status or "-", seconds, broken)
