"""A proxy's replicas, and the tries of a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Lock
from typing import TYPE_CHECKING, Any

from ragorder.adapters.http_server.headers import Headers
from ragorder.adapters.proxy.bodies.parsed import ParsedBody
from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.upstream import Upstream, UpstreamError
from ragorder.common.circuit_breaker import CircuitBreaker
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.replicas import BestReplica, ReplicaState
from ragorder.protocols import OrdererLike

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

# A mistaken Retry-After must not cost a replica for a day.
_LONGEST_ASKED_S = 600.0
_ASKS = (429, 503)


class RefusedError(UpstreamError):
    """The server asks to retry later (Retry-After)."""


def make_backoff(clock: Callable[[], float] = time.monotonic) -> CircuitBreaker:
    """Failures are a 500, 502, 503 or 504 and broken connections."""
    return CircuitBreaker(failures=5, first_s=1.0, longest_s=60.0, clock=clock)


def requested_backoff_s(status: int, retry_after: str) -> float | None:
    """Return the seconds of Retry-After, a number or a date."""
    if status not in _ASKS:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        until = parsedate_to_datetime(retry_after)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    # A date without a zone is in UTC, as "-0000" says.
    until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


RANK = b"x-data-parallel-rank"
"""Header that selects a data-parallel rank of vLLM and SGLang."""


@dataclass(frozen=True, slots=True)
class ReplicaAddress:
    """A server, or a data-parallel rank of it, and its cache's orderer."""

    upstream: str
    orderer: OrdererLike
    rank: int | None = None


@dataclass(eq=False)
class Replica:
    """`up`: its server answered last time; `served`: requests sent to it; `pauses`: backoffs after failures."""

    number: int
    server: Upstream
    orderer: RequestOrderer
    rank: int | None = None
    up: bool = True
    draining: bool = False
    backoff: CircuitBreaker = field(default_factory=make_backoff)
    in_flight: int = 0
    served: int = 0
    pauses: int = 0

    @property
    def takes_requests(self) -> bool:
        return self.up and not self.draining

    @property
    def headers(self) -> Headers:
        return [] if self.rank is None else [(RANK, b"%d" % self.rank)]

    def failed(self) -> None:
        self.pauses += self.backoff.failed() > 0


# Between two checks of a server that has just failed.
_SHORTEST_S = 0.1


class Fleet:
    """Replicas with a tree each. A request goes to the best by predicted cached tokens and load.

        fleet = Fleet([ReplicaAddress("http://gpu1:8000", Orderer()), ReplicaAddress("http://gpu2:8000", Orderer())])
        make_app(Orderer(), upstream=fleet)

    No new requests go to a draining replica, a failed one until it answers its health check (every `check_s` seconds),
    or one in backoff. If all are in backoff, the first to be ready is used; if all have failed, any. Raises ValueError
    without replicas, and for a repeated one or a shared orderer.
    """

    def __init__(
        self, addresses: Sequence[ReplicaAddress], *, check_s: float = 2.0, registry: CollectorRegistry | None = None
    ) -> None:
        names = [(_root(each.upstream), each.rank) for each in addresses]
        if not names or len(set(names)) < len(names):
            raise ValueError("give at least one replica, and each server or rank once")
        if len({id(each.orderer) for each in addresses}) < len(addresses):
            raise ValueError("replicas share an orderer, but each has its own cache: give each its own orderer")
        self.addresses = tuple(addresses)
        self.replicas: Sequence[Replica] = ()
        self._check_s = check_s
        self._lock = Lock()
        self._best: BestReplica[Replica] = BestReplica()
        self._suspected = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        if registry is not None:
            registry.register(self)

    def connect(self, server: Callable[[str], Upstream], orderer: Callable[[OrdererLike], RequestOrderer]) -> None:
        servers: dict[str, Upstream] = {}
        for each in self.addresses:
            if (root := _root(each.upstream)) not in servers:
                servers[root] = server(each.upstream)
        self.replicas = [
            Replica(number, servers[_root(each.upstream)], orderer(each.orderer), each.rank)
            for number, each in enumerate(self.addresses)
        ]

    def take(
        self, parsed: ParsedBody | None, tried: Collection[Replica] = (), only: Replica | None = None
    ) -> Replica | None:
        """Choose a replica and count the request; return None if none is left. Thread-safe."""
        candidates = self._candidates(tried) if only is None else [only]
        if not candidates:
            return None
        lengths = {each: self._lengths(each, parsed) for each in candidates}
        with self._lock:
            chosen = self._best.choose({each: ReplicaState(lengths[each], each.in_flight) for each in candidates})
            chosen.in_flight += 1
            chosen.served += 1
            chosen.backoff.begin()
        return chosen

    def leave(self, replica: Replica) -> None:
        with self._lock:
            replica.in_flight -= 1

    def has_other(self, tried: Collection[Replica]) -> bool:
        return bool(self._candidates(tried))

    def has_other_ready(self, tried: Collection[Replica]) -> bool:
        return any(each.takes_requests and not each.backoff.left_s for each in self.replicas if each not in tried)

    def predict_cached_tokens(self, parsed: ParsedBody) -> CachedLengths:
        return max((self._lengths(each, parsed) for each in self._candidates(())), default=CachedLengths(0, 1))

    def back_off(self, replica: Replica, seconds: float) -> None:
        for each in self.replicas:
            if each.server is replica.server:
                each.backoff.pause(min(seconds, _LONGEST_ASKED_S))

    def suspect(self, replica: Replica) -> None:
        for each in self.replicas:
            if each.server is replica.server:
                each.up = False
        self._suspected.set()

    def begin_checks(self) -> None:
        """Start health checks in the running event loop. Idempotent."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._check_forever())

    async def check(self) -> bool:
        servers = list(dict.fromkeys(replica.server for replica in self.replicas))
        up = dict(zip(servers, await asyncio.gather(*(server.answers() for server in servers)), strict=True))
        for replica in self.replicas:
            replica.up = up[replica.server]
        return any(replica.takes_requests for replica in self.replicas)

    async def aclose(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for server in dict.fromkeys(replica.server for replica in self.replicas):
            await server.aclose()

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "replica": each.number,
                "server": each.server.root,
                "rank": each.rank,
                "up": each.up,
                "draining": each.draining,
                "rests_s": round(each.backoff.left_s, 1),
                "in_flight": each.in_flight,
                "served": each.served,
            }
            for each in self.replicas
        ]

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        up = GaugeMetricFamily("ragorder_replica_up", "Whether a replica takes requests.", labels=["replica"])
        in_flight = GaugeMetricFamily(
            "ragorder_replica_in_flight_requests", "Requests of a replica not yet answered.", labels=["replica"]
        )
        backoff = GaugeMetricFamily(
            "ragorder_replica_rest_seconds",
            "Time for which a replica backs off after refusals or failures.",
            labels=["replica"],
        )
        served = CounterMetricFamily("ragorder_replica_requests", "Requests sent to a replica.", labels=["replica"])
        for each in self.replicas:
            label = [str(each.number)]
            up.add_metric(label, int(each.takes_requests))
            in_flight.add_metric(label, each.in_flight)
            backoff.add_metric(label, each.backoff.left_s)
            served.add_metric(label, each.served)
        yield from (up, in_flight, backoff, served)

    def _candidates(self, tried: Collection[Replica]) -> list[Replica]:
        left = [each for each in self.replicas if not each.draining and each not in tried]
        # If no replica is known to answer, the check may be late.
        answering = [each for each in left if each.up] or left
        waits = {each: each.backoff.left_s for each in answering}
        ready = [each for each in answering if not waits[each]]
        # If all are in backoff, a request is not refused for what another client may have caused.
        return ready or sorted(answering, key=waits.__getitem__)[:1]

    def _lengths(self, replica: Replica, parsed: ParsedBody | None) -> CachedLengths:
        return CachedLengths(0, 1) if parsed is None else replica.orderer.predict_cached_tokens(parsed)

    async def _check_forever(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_s):
                    await self._suspected.wait()
            self._suspected.clear()
            # A check that fails must not be the last one.
            with suppress(Exception):
                await self.check()
            await asyncio.sleep(_SHORTEST_S)


def _root(address: str) -> str:
    return address.strip().rstrip("/").removesuffix("/v1").rstrip("/")


_FAILED = (500, 502, 503, 504)


class Tries:
    """The `replicas` that a request was sent to. `repeatable`: another may get it even if one has received it.
    `counted`: failures may cause a backoff. `only`: the one that can answer."""

    def __init__(self, fleet: Fleet, *, repeatable: bool, counted: bool, only: Replica | None = None) -> None:
        self.replicas: list[Replica] = []
        self.only = only
        self._fleet = fleet
        self._repeatable = repeatable and only is None
        self._counted = counted
        self._has_failed = False
        self._succeeds = False
        self._pauses = 0

    def begin(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self._has_failed = self._succeeds = False
        self._pauses = replica.pauses

    @property
    def refusable(self) -> bool:
        return self._repeatable and self._fleet.has_other(self.replicas)

    def answered(self, status: int, retry_after: str) -> None:
        """Raises RefusedError if the replica asks for a backoff and another may answer."""
        replica = self.replicas[-1]
        backoff_s = requested_backoff_s(status, retry_after)
        if backoff_s is not None:
            self._fleet.back_off(replica, backoff_s)
            if self._repeatable and self._fleet.has_other_ready(self.replicas):
                raise RefusedError(status, "The upstream server does not take requests.", code="upstream_unavailable")
        elif self._counted and status in _FAILED:
            self._has_failed = True
            replica.failed()
        else:
            self._succeeds = self._counted

    def ended(self) -> None:
        """Count a success: the answer has ended, or its client has left it after its beginning. Idempotent."""
        replica = self.replicas[-1]
        # An answer from before a backoff says nothing about its cause.
        if self._succeeds and self._pauses == replica.pauses:
            replica.backoff.succeeded()
        self._succeeds = False

    def failed(self) -> None:
        replica = self.replicas[-1]
        self._fleet.suspect(replica)
        if self._counted and not self._has_failed:
            replica.failed()
        self._has_failed, self._succeeds = True, False

    def gives_up(self, error: UpstreamError, *, begun: bool) -> bool:
        if not isinstance(error, RefusedError):
            self.failed()
        if begun or self.only is not None or not (self._repeatable or not error.connected):
            return True
        return not self._fleet.has_other(self.replicas)
