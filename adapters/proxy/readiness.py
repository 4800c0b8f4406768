"""Probes of an upstream server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.proxy.upstream import Upstream

__all__ = ["Readiness", "answers"]

_TIMEOUT_S = 2.0
_CACHED_S = 1.0
# vLLM, SGLang and others have the first one; all have the second.
_PATHS = (b"/health", b"/v1/models")
_NO_SUCH_PATH = (404, 405)


async def answers(server: Upstream) -> bool:
    """Whether the server answers within two seconds, without an error of its own."""
    status = 0
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            for path in _PATHS:
                async with server.send("GET", path, [], None) as response:
                    status = response.status_code
                if status not in _NO_SUCH_PATH:
                    break
    except (HTTPError, TimeoutError):
        return False
    return status < 500


class Readiness:
    """The answer to `/ragorder/ready`; checks once a second."""

    def __init__(self, check: Callable[[], Awaitable[bool]]) -> None:
        self._check = check
        self._checking = asyncio.Lock()
        self._checked_at = -_CACHED_S
        self._ready = False

    async def answer(self, _: Request) -> JSONResponse:
        async with self._checking:
            if time.monotonic() - self._checked_at >= _CACHED_S:
                self._ready = await self._check()
                self._checked_at = time.monotonic()
        if self._ready:
            return JSONResponse({"status": "ready"})
        error = HTTPError(
            503, "The upstream server does not answer, or answers with an error.", code="upstream_not_ready"
        )
        return JSONResponse(error.content, status_code=error.status)
