"""One of several caches behind the proxy."""

from __future__ import annotations

from dataclasses import dataclass

from ragorder.adapters.http_server.headers import Headers
from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.rests import Rests
from ragorder.adapters.proxy.upstream import Upstream
from ragorder.orderer import OrdererLike

__all__ = ["RANK", "Replica", "ReplicaAddress"]

RANK = b"x-data-parallel-rank"
"""The header by which vLLM and SGLang take a request to a rank of theirs."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A server, or data-parallel rank `rank` of it, and the orderer of its cache."""

    upstream: str
    orderer: OrdererLike
    rank: int | None = None


class Replica:
    def __init__(self, number: int, server: Upstream, orderer: RequestOrderer, rank: int | None = None) -> None:
        self.number = number
        self.server = server
        self.orderer = orderer
        self.rank = rank
        self.up = True
        """Whether its server answered last time."""
        self.draining = False
        self.rests = Rests()
        self.in_flight = 0
        self.served = 0
        """Requests sent to it."""

    @property
    def takes_requests(self) -> bool:
        return self.up and not self.draining

    @property
    def headers(self) -> Headers:
        """Those that its requests need."""
        return [] if self.rank is None else [(RANK, b"%d" % self.rank)]
