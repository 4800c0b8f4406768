"""An httpx2 transport to the replicas of a deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2

from ragorder.adapters.http_server.headers import end_to_end
from ragorder.adapters.ray.answer import ReplicaAnswer, ReplicaLostError
from ragorder.adapters.ray.replica import ReplicaRequest

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

__all__ = ["REFUSED", "TRIES", "ReplicaTransport"]

TRIES = 3
"""Most replicas that a request is sent to."""

REFUSED = (502, 503)
"""Statuses of a replica whose engine takes no requests: another one may."""


class ReplicaTransport(httpx2.AsyncBaseTransport):
    """Transport to the replica of a request's session, the header `x-session-id`; without one to any. A request whose
    replica is lost before its answer has begun, or takes no requests, is sent to any other one."""

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
