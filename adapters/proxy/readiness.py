"""Health and models of the upstream servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.untrusted_json import NOT_JSON
from ragorder.adapters.proxy.upstream import Upstream
from ragorder.adapters.structs import readable_by_threads

__all__ = ["Readiness", "Served", "answers"]

_TIMEOUT_S = 2.0
_CACHED_S = 1.0
# vLLM, SGLang and others have the first one; all have the second.
_PATHS = (b"/health", b"/v1/models")
_NO_SUCH_PATH = (404, 405)
# A cloud lists hundreds of models.
_MODELS_S = 60.0
_MOST_BYTES = 1 << 20
_MOST_MODELS = 3
_LONGEST_NAME = 120


async def answers(server: Upstream) -> bool:
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
    """Answer to `/ragorder/ready`; checks at most once a second."""

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


@readable_by_threads
class _Model(msgspec.Struct):
    id: str


@readable_by_threads
class _Models(msgspec.Struct):
    data: list[_Model]


class Served:
    """Answer to `/ragorder/served`: the addresses of the `servers`, a few of the first one's models and the number of
    its other models (read once a minute), and the facts `about` the proxy."""

    def __init__(self, servers: Sequence[Upstream], about: Mapping[str, Any]) -> None:
        self._server = servers[0]
        self._about = {"servers": list(dict.fromkeys(each.root for each in servers)), **about}
        self._asking = asyncio.Lock()
        self._asked_at = -_MODELS_S
        self._models: list[str] = []

    async def answer(self, _: Request) -> JSONResponse:
        async with self._asking:
            if time.monotonic() - self._asked_at >= _MODELS_S:
                self._models = await _models_of(self._server)
                self._asked_at = time.monotonic()
        shown = [name[:_LONGEST_NAME] for name in self._models[:_MOST_MODELS]]
        models = {"models": shown, "more_models": len(self._models) - len(shown)}
        return JSONResponse(self._about | models, headers={"Cache-Control": "no-store"})


async def _models_of(server: Upstream) -> list[str]:
    content = b""
    with suppress(HTTPError, TimeoutError, *NOT_JSON):
        async with (
            asyncio.timeout(_TIMEOUT_S),
            server.send("GET", b"/v1/models", [(b"accept-encoding", b"identity")], None) as response,
        ):
            async for chunk in response.aiter_raw():
                content += chunk
                if len(content) > _MOST_BYTES:
                    return []
        return [model.id for model in msgspec.json.decode(content, type=_Models).data]
    return []
