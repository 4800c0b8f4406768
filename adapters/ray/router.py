"""Request router for replicas chosen by the ingress.

Ray pickles this module by value: state shared by processes belongs elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica

__all__ = ["ChosenReplicaRouter"]


class ChosenReplicaRouter(RequestRouter):  # type: ignore[misc]
    """Router that tries the replicas in the order of the `ReplicaChoice` passed to `choose_replica`."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not pending_request.args or not candidate_replicas:
            return [candidate_replicas]
        if (rank := getattr(pending_request.args[0], "rank", None)) is None:
            return [candidate_replicas]
        # If all are full, Ray waits before it asks again.
        pending_request.routing_context.should_backoff = True
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        return [[replicas[each]] for each in rank(list(replicas))]
