"""Readiness: whether the server behind would answer."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import JSONResponse

from ragorder.adapters.http_server.errors import ProxyError
from ragorder.adapters.proxy.upstream import Upstream

__all__ = ["Ready"]

_WAIT_S = 2.0
_REMEMBERED_S = 1.0
# vLLM, SGLang and others have the first one; all have the second.
_PATHS = (b"/health", b"/v1/models")
_NO_SUCH_PATH = (404, 405)


class Ready:
    """Asks the upstream server, at most once a second however often it is asked itself. `answer` is the endpoint: 200
    if the server answers within two seconds without an error of its own, 503 otherwise."""

    def __init__(self, server: Upstream) -> None:
        self._server = server
        self._asking = asyncio.Lock()
        self._asked = -_REMEMBERED_S
        self._ready = False

    async def answer(self, _: Request) -> JSONResponse:
        async with self._asking:
            if time.monotonic() - self._asked >= _REMEMBERED_S:
                self._ready = await self._answers()
                self._asked = time.monotonic()
        if self._ready:
            return JSONResponse({"status": "ready"})
        error = ProxyError(503, "The upstream server does not answer, or is not well.", code="upstream_not_ready")
        return JSONResponse(error.content, status_code=error.status)

    async def _answers(self) -> bool:
        status = 0
        try:
            async with asyncio.timeout(_WAIT_S):
                for path in _PATHS:
                    async with self._server.send("GET", path, [], None) as response:
                        status = response.status_code
                    if status not in _NO_SUCH_PATH:
                        break
        except (ProxyError, TimeoutError):
            return False
        return status < 500
