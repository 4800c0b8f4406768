"""Several replicas behind one proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import TYPE_CHECKING, Any

from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.parsing import ParsedBody
from ragorder.adapters.proxy.readiness import answers
from ragorder.adapters.proxy.replica import Replica, ReplicaAddress
from ragorder.adapters.proxy.upstream import Upstream
from ragorder.orderer import OrdererLike
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.replicas import BestReplica, ReplicaState

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

__all__ = ["Fleet"]

# Between two checks of a server that has just failed.
_SHORTEST_S = 0.1


class Fleet:
    """Replicas, each with a tree of its own; a request goes to the best by predicted cached tokens and load.

        fleet = Fleet([ReplicaAddress("http://gpu1:8000", Orderer()), ReplicaAddress("http://gpu2:8000", Orderer())])
        make_app(Orderer(), upstream=fleet)

    A replica whose server fails gets no requests until it answers its health check again, every `check_s` seconds, and
    one that rests (`Rests`) none meanwhile; a draining one gets none and ends those that it has. If no other is left,
    the one that rests for the shortest time gets them, and then those that failed. Raises ValueError for no replicas,
    or one twice.
    """

    def __init__(
        self, addresses: Sequence[ReplicaAddress], *, check_s: float = 2.0, registry: CollectorRegistry | None = None
    ) -> None:
        names = [(_root(each.upstream), each.rank) for each in addresses]
        if not names or len(set(names)) < len(names):
            raise ValueError("give at least one replica, and each server or rank once")
        if len({id(each.orderer) for each in addresses}) < len(addresses):
            raise ValueError("each replica has a cache of its own: give each an orderer of its own")
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
        """Make the replicas; ranks of one server share its connections."""
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
        """The replica for a request, `only` this one if there is one; it then has the request in flight. None if all
        were tried or are draining. Callable by any thread."""
        candidates = self._candidates(tried) if only is None else [only]
        if not candidates:
            return None
        lengths = {each: self._lengths(each, parsed) for each in candidates}
        with self._lock:
            chosen = self._best.choose({each: ReplicaState(lengths[each], each.in_flight) for each in candidates})
            chosen.in_flight += 1
            chosen.served += 1
            chosen.rests.taken()
        return chosen

    def leave(self, replica: Replica) -> None:
        """A request of the replica has ended."""
        with self._lock:
            replica.in_flight -= 1

    def has_other(self, tried: Collection[Replica]) -> bool:
        return bool(self._candidates(tried))

    def has_rested(self, tried: Collection[Replica]) -> bool:
        """Another one that answers and does not rest."""
        return any(each.takes_requests and not each.rests.left_s for each in self.replicas if each not in tried)

    def predict_cached_tokens(self, parsed: ParsedBody) -> CachedLengths:
        """On the replica that has most of the request cached."""
        return max((self._lengths(each, parsed) for each in self._candidates(())), default=CachedLengths(0, 1))

    def rest(self, replica: Replica, seconds: float) -> None:
        """Its server asks for it."""
        for each in self.replicas:
            if each.server is replica.server:
                each.rests.ask(seconds)

    def suspect(self, replica: Replica) -> None:
        """Its server has failed: it is checked at once."""
        for each in self.replicas:
            if each.server is replica.server:
                each.up = False
        self._suspected.set()

    def begin_checks(self) -> None:
        """In the running event loop, once."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._check_forever())

    async def check(self) -> bool:
        """Whether any replica takes requests, by what its server answers now."""
        servers = list(dict.fromkeys(replica.server for replica in self.replicas))
        up = dict(zip(servers, await asyncio.gather(*map(answers, servers)), strict=True))
        for replica in self.replicas:
            replica.up = up[replica.server]
        return any(replica.takes_requests for replica in self.replicas)

    async def aclose(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for server in dict.fromkeys(replica.server for replica in self.replicas):
            await server.aclose()

    def as_json(self) -> list[dict[str, Any]]:
        """Addresses without user and password."""
        return [
            {
                "replica": each.number,
                "server": each.server.root,
                "rank": each.rank,
                "up": each.up,
                "draining": each.draining,
                "rests_s": round(each.rests.left_s, 1),
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
        rests = GaugeMetricFamily(
            "ragorder_replica_rest_seconds",
            "Time for which a replica rests after refusals or failures.",
            labels=["replica"],
        )
        served = CounterMetricFamily("ragorder_replica_requests", "Requests sent to a replica.", labels=["replica"])
        for each in self.replicas:
            label = [str(each.number)]
            up.add_metric(label, int(each.takes_requests))
            in_flight.add_metric(label, each.in_flight)
            rests.add_metric(label, each.rests.left_s)
            served.add_metric(label, each.served)
        yield from (up, in_flight, rests, served)

    def _candidates(self, tried: Collection[Replica]) -> list[Replica]:
        left = [each for each in self.replicas if not each.draining and each not in tried]
        # Where none is known to answer, the check may be late.
        answering = [each for each in left if each.up] or left
        resting = {each: each.rests.left_s for each in answering}
        rested = [each for each in answering if not resting[each]]
        # Where all rest, a request is not refused for what another client may have caused.
        return rested or sorted(answering, key=resting.__getitem__)[:1]

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
    """One server may be given with and without /v1."""
    return address.strip().rstrip("/").removesuffix("/v1").rstrip("/")
