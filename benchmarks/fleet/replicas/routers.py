"""Policies that choose a replica for a request."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import ClassVar

from ragorder import Document
from ragorder.benchmarks.fleet.replicas.record import ReplicasCell
from ragorder.benchmarks.fleet.replicas.replica import SimulatedReplica
from ragorder.benchmarks.fleet.replicas.ring import Ring
from ragorder.pipelining.replicas import BestReplica, ReplicaState
from ragorder.topic import Topics

__all__ = ["ROUTERS", "Router"]

Replicas = Mapping[int, SimulatedReplica]

_SECRET = "the same in every run"  # noqa: S105


class Router(ABC):
    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        self.cell = cell
        self.rng = random.Random(seed)

    def changed(self, replicas: Replicas) -> float | None:
        """Replicas were added or removed; the share of the topics so far that have another owner, if there are any."""
        return None

    @abstractmethod
    def choose(self, documents: Sequence[Document], replicas: Replicas) -> int: ...


class Random(Router):
    def choose(self, documents: Sequence[Document], replicas: Replicas) -> int:
        return self.rng.choice(list(replicas))


class InTurn(Router):
    turn = 0

    def choose(self, documents: Sequence[Document], replicas: Replicas) -> int:
        self.turn += 1
        return list(replicas)[self.turn % len(replicas)]


class LeastBusy(Router):
    def choose(self, documents: Sequence[Document], replicas: Replicas) -> int:
        return min(replicas, key=lambda number: (replicas[number].in_flight, self.rng.random()))


class TopicOwner(Router):
    """The owner of the topic, however busy."""

    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        super().__init__(cell, seed)
        self._topics = Topics(_SECRET, share=cell.share)
        self._seen: dict[str, None] = {}
        self._ring = Ring([])

    @property
    def topics(self) -> int:
        """Seen so far."""
        return len(self._seen)

    def changed(self, replicas: Replicas) -> float | None:
        former, self._ring = self._ring, Ring(replicas)
        moved = sum(next(former.owners(topic)) != next(self._ring.owners(topic)) for topic in self._seen)
        return moved / len(self._seen) if self._seen else None

    def choose(self, documents: Sequence[Document], replicas: Replicas) -> int:
        topic = self._topics.of(document.key for document in documents) or ""
        self._seen[topic] = None
        return self.owner(topic, replicas)

    def owner(self, topic: str, replicas: Replicas) -> int:
        return next(self._ring.owners(topic))


class BoundedOwner(TopicOwner):
    """The first owner with at most `bound` times the mean number in flight, rounded up (Mirrokni, Thorup and
    Zadimoghaddam 2018)."""

    bound: ClassVar[float]

    def owner(self, topic: str, replicas: Replicas) -> int:
        in_flight = 1 + sum(replica.in_flight for replica in replicas.values())
        most = ceil(self.bound * in_flight / len(replicas))
        return next(number for number in self._ring.owners(topic) if replicas[number].in_flight < most)


class BoundedBy2(BoundedOwner):
    bound = 2.0


class BoundedBy1Half(BoundedOwner):
    bound = 1.5


class BoundedBy1Quarter(BoundedOwner):
    bound = 1.25


class TableOwner(TopicOwner):
    """The replica that was least busy when the topic was new, as routers with a table of sessions choose it; again once
    that has `bound` times the mean number in flight."""

    bound: ClassVar[float] = inf

    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        super().__init__(cell, seed)
        self._owners: dict[str, int] = {}

    def changed(self, replicas: Replicas) -> float | None:
        topics = len(self._owners)
        self._owners = {topic: owner for topic, owner in self._owners.items() if owner in replicas}
        return 1 - len(self._owners) / topics if topics else None

    def owner(self, topic: str, replicas: Replicas) -> int:
        in_flight = 1 + sum(replica.in_flight for replica in replicas.values())
        owner = self._owners.get(topic)
        if owner is None or replicas[owner].in_flight >= self.bound * in_flight / len(replicas):
            owner = min(replicas, key=lambda number: (replicas[number].in_flight, self.rng.random()))
            self._owners[topic] = owner
        return owner


class TableBoundBy2(TableOwner):
    bound = 2.0


class Best(Router):
    """The best of all, by predicted cached tokens and load."""

    def __init__(self, cell: ReplicasCell, seed: int) -> None:
        super().__init__(cell, seed)
        self._best: BestReplica[int] = BestReplica()

    def choose(self, documents: Sequence[Document], replicas: Replicas) -> int:
        return self._best.choose(
            {number: ReplicaState(each.predict(documents), each.in_flight) for number, each in replicas.items()}
        )


ROUTERS: Mapping[str, type[Router]] = {
    "random": Random,
    "in turn": InTurn,
    "least busy": LeastBusy,
    "topic": TopicOwner,
    "topic, bound 2": BoundedBy2,
    "topic, bound 1.5": BoundedBy1Half,
    "topic, bound 1.25": BoundedBy1Quarter,
    "topic, table": TableOwner,
    "topic, table, bound 2": TableBoundBy2,
    "best": Best,
}
