"""Consistent hashing, as routers do it."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from hashlib import blake2b

__all__ = ["Ring"]

# Points of a replica: its share of the keys deviates by a tenth with 100, by a thirtieth with so many.
_POINTS = 1000


class Ring:
    """Replicas on a ring of hashes, each at many points.

        next(Ring(range(16)).owners("topic"))

    A key belongs to the replica at the next point; if that is too busy, to those after it.
    """

    def __init__(self, replicas: Iterable[int]) -> None:
        points = sorted((_hash(f"{replica}:{point}"), replica) for replica in replicas for point in range(_POINTS))
        self._places = [place for place, _ in points]
        self._replicas = [replica for _, replica in points]

    def owners(self, key: str) -> Iterator[int]:
        """All replicas, each once."""
        seen = set()
        start = bisect(self._places, _hash(key))
        for step in range(len(self._replicas)):
            replica = self._replicas[(start + step) % len(self._replicas)]
            if replica not in seen:
                seen.add(replica)
                yield replica


def _hash(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
