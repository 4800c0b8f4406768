"""httpx2 transport to a deployment's replicas, and their answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx2
from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)

from ragorder.adapters.http_server.errors import HTTPError
from ragorder.adapters.http_server.headers import end_to_end
from ragorder.adapters.proxy.upstream import UpstreamError
from ragorder.adapters.proxy.usage import StreamReader, reader_for
from ragorder.adapters.ray.replica import ReplicaRequest

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

_RETRY = [(b"retry-after", b"1")]
TRIES = 3
"""Most replicas that a request is sent to."""
REFUSED = (502, 503)
"""Statuses of an engine that takes no requests."""


class ReplicaLostError(UpstreamError): ...


class ReplicaAnswer(httpx2.AsyncByteStream):
    """Response of `EngineReplica.answer`'s items, each within `timeout_s`. A stream cut off between events ends with an
    error event. Closing it cancels the request."""

    def __init__(self, items: DeploymentResponseGenerator, timeout_s: float | None = None) -> None:
        self._items = items
        self._timeout_s = timeout_s
        self._ended = False
        self._of_events = False

    async def begin(self) -> httpx2.Response:
        """Return the unread response. Raises HTTPError; for a failed replica UpstreamError or ReplicaLostError."""
        try:
            first = await self._next()
            if first is None:
                raise UpstreamError(502, "The replica did not answer.", code="upstream_unavailable")
        except BaseException:
            self._cancel()
            raise
        status, headers = first
        self._of_events = isinstance(reader_for(headers), StreamReader)
        return httpx2.Response(status, headers=headers, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        between_events = True
        try:
            while (chunk := await self._next()) is not None:
                between_events = chunk.endswith(b"\n\n")
                yield chunk
        except UpstreamError as error:
            if self._of_events and between_events:
                yield b"data: " + json.dumps(error.content).encode() + b"\n\n"
            raise

    async def aclose(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        if not self._ended:
            self._ended = True
            # It may have ended just now.
            with suppress(Exception):
                self._items.cancel()

    async def _next(self) -> Any:
        try:
            with as_http_errors():
                async with asyncio.timeout(self._timeout_s):
                    return await anext(self._items)
        except StopAsyncIteration:
            self._ended = True
            return None
        except TimeoutError:
            raise UpstreamError(504, "The replica did not answer in time.", code="upstream_timeout") from None


@contextmanager
def as_http_errors() -> Iterator[None]:
    """Raise Ray's errors, which may quote a request, as HTTPErrors."""
    try:
        yield
    except BackPressureError:
        message = "Too many requests wait for a replica: try again later."
        raise HTTPError(503, message, code="too_many_waiting", headers=_RETRY) from None
    except DeploymentUnavailableError:
        message = "The engines could not be started: see Ray Serve's status."
        raise HTTPError(503, message, code="no_replica", headers=_RETRY) from None
    except (RayTaskError, TaskCancelledError, RequestCancelledError):
        raise UpstreamError(502, "The replica failed: see its log.", code="upstream_unavailable") from None
    except (RayError, ReplicaUnavailableError):
        raise ReplicaLostError(502, "The replica was lost.", code="upstream_unavailable") from None


class ReplicaTransport(httpx2.AsyncBaseTransport):
    """Transport to the replica of a request's `x-session-id`, or to any without one. If that replica is lost before its
    answer begins, or takes no requests, a repeatable request goes to any replica."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(method_name="answer", stream=True)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Raises HTTPError, also while the answer is read."""
        target = request.extensions.get("target", request.url.raw_path)
        asked = ReplicaRequest(request.method, target, end_to_end(request.headers.raw), await request.aread())
        timeout_s = request.extensions.get("timeout", {}).get("read")
        replicas = self._replicas if asked.session is None else self._replicas.options(session_id=asked.session)
        tries = TRIES if asked.repeatable else 1
        while True:
            tries -= 1
            try:
                response = await ReplicaAnswer(replicas.remote(asked), timeout_s).begin()
            except ReplicaLostError:
                if not tries:
                    raise
            else:
                if not tries or response.status_code not in REFUSED:
                    return response
                await response.aclose()
            # Its own replica would be chosen again.
            replicas = self._replicas
