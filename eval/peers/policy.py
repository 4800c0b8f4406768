"""A peer as a policy."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from ragorder.document import Document
from ragorder.eval.peers.environment import prepare_peer
from ragorder.eval.peers.worker import Worker
from ragorder.orderer import USUAL, Lengths
from ragorder.ordering import Ordering

__all__ = ["PeerPolicy", "make_peer"]

_workers: dict[str, Worker] = {}


@atexit.register
def _close() -> None:
    for worker in _workers.values():
        worker.close()


def make_peer(name: str) -> PeerPolicy:
    """A policy for one run. One process serves all. Raises PeerError if the peer cannot be installed or started."""
    worker = _workers.get(name)
    if worker is None or not worker.alive:
        script = Path(__file__).with_name(f"{name}_worker.py")
        worker = _workers[name] = Worker(prepare_peer(name), script)
    return PeerPolicy(worker)


class PeerPolicy:
    """Orders as the peer does; retrieval order if it raises or returns other documents: `fallbacks` counts both,
    `first_error` is the first message.

    `clock_ns` is the peer's own CPU time. Raises PeerError if its process is dead."""

    def __init__(self, worker: Worker) -> None:
        self.fallbacks = 0
        self.first_error: str | None = None
        self._worker = worker
        self._run = worker.new_run()
        self._numbers: dict[str, int] = {}
        self._spent_ns = 0
        weakref.finalize(self, worker.end, self._run)

    def clock_ns(self) -> int:
        return self._spent_ns

    def order(
        self, documents: list[Document], *, waiting: Sequence[list[Document]] = (), lengths: Lengths = USUAL
    ) -> Ordering[Document]:
        """Without the waiting requests."""
        return next(self.order_batch([documents]))

    def order_batch(
        self, requests: Sequence[list[Document]], *, lengths: Lengths = USUAL, max_wait: int | None = None
    ) -> Iterator[Ordering[Document]]:
        """All requests, in the peer's order of serving, without a bound on waiting."""
        numbered = [[self._number(document) for document in documents] for documents in requests]
        answer = self._worker.order(self._run, numbered)
        self._spent_ns += int(answer.get("ns", 0))
        indices, orders = answer.get("indices", []), answer.get("orders", [])
        if sorted(indices) != list(range(len(requests))) or len(orders) != len(requests):
            reason = str(answer.get("error", "answered for other requests than it was given"))
            indices, orders = range(len(requests)), [None] * len(requests)
        else:
            reason = "answered with other documents than it was given"
        for index, order in zip(indices, orders, strict=True):
            permutation = _permutation(numbered[index], order)
            if permutation is None:
                self._fall_back(reason)
                permutation = list(range(len(requests[index])))
            ordering = Ordering([requests[index][rank] for rank in permutation], permutation)
            ordering.index = index
            yield ordering

    def _number(self, document: Document) -> int:
        return self._numbers.setdefault(document.key, len(self._numbers))

    def _fall_back(self, reason: str) -> None:
        self.fallbacks += 1
        self.first_error = self.first_error or reason


def _permutation(given: Sequence[int], order: Sequence[int] | None) -> list[int] | None:
    if order is None or sorted(order) != sorted(given):
        return None
    ranks: dict[int, list[int]] = {}
    for rank in range(len(given) - 1, -1, -1):
        ranks.setdefault(given[rank], []).append(rank)
    return [ranks[number].pop() for number in order]
