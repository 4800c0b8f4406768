"""Mirrors of the replicas' caches in the ingress."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from ragorder.adapters.proxy.ordering import RequestOrderer
from ragorder.adapters.proxy.parsing import ParsedBody
from ragorder.pipelining.reordering import CachedLengths
from ragorder.pipelining.replicas import BestReplica, ReplicaState

__all__ = ["ReplicaChoice", "ReplicaMirrors"]

_UNKNOWN = CachedLengths(0, 1)


@dataclass(slots=True)
class _Mirror:
    orderer: RequestOrderer
    in_flight: int = 0


class ReplicaMirrors:
    """An orderer for each replica, by its id, made when it is first seen and dropped with it. Thread-safe.

    mirrors = ReplicaMirrors(lambda: RequestOrderer(Orderer(capacity_tokens=262_144)))
    """

    def __init__(self, make_orderer: Callable[[], RequestOrderer]) -> None:
        self._make_orderer = make_orderer
        self._mirrors: dict[str, _Mirror] = {}
        self._best: BestReplica[str] = BestReplica()
        self._lock = Lock()

    def rank(self, replicas: Sequence[str], parsed: ParsedBody | None, tried: Collection[str] = ()) -> list[str]:
        """Return all replicas, the best for a request first, the others by their load; `tried` ones only if no others
        exist."""
        with self._lock:
            for gone in self._mirrors.keys() - set(replicas):
                if not self._mirrors[gone].in_flight:
                    del self._mirrors[gone]
            replicas = [each for each in replicas if each not in tried] or replicas
            mirrors = {each: self._of(each) for each in replicas}
        lengths = {
            each: _UNKNOWN if parsed is None else mirror.orderer.predict_cached_tokens(parsed)
            for each, mirror in mirrors.items()
        }
        with self._lock:
            states = {each: ReplicaState(lengths[each], mirror.in_flight) for each, mirror in mirrors.items()}
            chosen = self._best.choose(states)
        others = (each for each in replicas if each != chosen)
        return [chosen, *sorted(others, key=lambda each: mirrors[each].in_flight)]

    @contextmanager
    def in_flight(self, replica: str) -> Iterator[RequestOrderer]:
        with self._lock:
            mirror = self._of(replica)
            mirror.in_flight += 1
        try:
            yield mirror.orderer
        finally:
            with self._lock:
                mirror.in_flight -= 1

    def _of(self, replica: str) -> _Mirror:
        if replica not in self._mirrors:
            self._mirrors[replica] = _Mirror(self._make_orderer())
        return self._mirrors[replica]


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """Input of a request router: ranks replicas for this request, other than those `tried`."""

    mirrors: ReplicaMirrors
    parsed: ParsedBody | None
    tried: Collection[str] = ()

    def rank(self, replicas: Sequence[str]) -> list[str]:
        return self.mirrors.rank(replicas, self.parsed, self.tried)
