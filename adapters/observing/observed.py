"""An orderer that reports its requests to watchers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ragorder.orderer import Orderer
from ragorder.ordering import Batch, Moves, Ordering, RequestOutcome
from ragorder.scope.request import USUAL, Lengths
from ragorder.settings import OrdererOptions, Settings
from ragorder.trie.histories import History

if TYPE_CHECKING:
    from ragorder.clouds import Cost

D = TypeVar("D")

_logger = logging.getLogger("ragorder")
_PLAIN: OrdererOptions = {
    "moves": "prefix",
    "best": "any",
    "max_displacement": 0,
    "keep_first": 0,
    "keep_last": 0,
    "keep_groups": False,
}


@dataclass(frozen=True, slots=True)
class Observation:
    """One ordered request, without contents, ids or tenant.

    - `ordered_tokens`, `retrieval_tokens`: cached tokens predicted for each order; None if not compared
    - `documents_end`: in tokens of the prompt
    - `order_s`: seconds that ragorder's order took
    """

    shadow: bool
    documents: int
    documents_end: int
    ordered_tokens: int | None
    retrieval_tokens: int | None
    moves: Moves
    order_s: float
    fallback: bool
    ordered_cost: Cost | None = None
    retrieval_cost: Cost | None = None

    @property
    def predicted_tokens(self) -> int:
        return (self.retrieval_tokens if self.shadow else self.ordered_tokens) or 0


class Watcher(Protocol):
    """Gets every request, in the serving path. An optional method `watch` gets the `ObservedOrderer` once."""

    def ordered(self, observation: Observation) -> Callable[[RequestOutcome], None]:
        """Return what gets the request's outcome."""


class ObservedOrderer:
    """An `Orderer` with watchers. Their first error is logged; none is raised unless `strict`.

        orderer = ObservedOrderer(Orderer.for_vllm(url), [Metrics(), Tracing()])

    With `compare` a second orderer mirrors the cache in retrieval order: the difference is the saving. In `shadow` mode
    retrieval order is served, and the mirror scores ragorder's. Either doubles an order's time. Watchers
    belong to this pair, not to `Orderer`: each of the two knows one order only, and in shadow mode the clone serves.
    """

    def __init__(
        self, orderer: Orderer, watchers: Iterable[Watcher] = (), *, shadow: bool = False, compare: bool = True
    ) -> None:
        self.shadow = shadow
        self._watchers = tuple(watchers)
        self._orderer = orderer.clone(**_PLAIN) if shadow else orderer
        self._other = orderer.clone() if shadow else orderer.clone(**_PLAIN) if compare else None
        self._own = orderer
        self._failed = False
        # Questions that no watcher hears.
        self.preview = self._orderer.preview
        self.predict_cached_tokens = self._orderer.predict_cached_tokens
        self.holds_prefix = self._orderer.holds_prefix
        self.topic = orderer.topic
        for watcher in self._watchers:
            if (watch := getattr(watcher, "watch", None)) is not None:
                watch(self)

    @property
    def settings(self) -> Settings:
        return self._own.settings

    @property
    def degraded(self) -> tuple[str, ...]:
        return self._own.degraded

    def degrade(self, reason: str) -> None:
        self._own.degrade(reason)

    def __copy__(self) -> ObservedOrderer:
        return self._around(copy(self._own))

    def __deepcopy__(self, memo: dict[int, Any]) -> ObservedOrderer:
        return self._around(deepcopy(self._own, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        # Watchers have locks, sockets and registries, which stay with this process.
        return _unwatched, (self._own, self.shadow, self._other is not None)

    def _around(self, orderer: Orderer) -> ObservedOrderer:
        return ObservedOrderer(orderer, self._watchers, shadow=self.shadow, compare=self._other is not None)

    def __repr__(self) -> str:
        return f"ObservedOrderer({self._own!r}, shadow={self.shadow})"

    @property
    def fallbacks(self) -> int:
        return sum(orderer.fallbacks for orderer in {self._orderer, self._ours})

    @property
    def tree_size(self) -> int:
        return self._ours.tree_size

    @property
    def evicted_blocks(self) -> int:
        return self._ours.evicted_blocks

    def order(
        self,
        documents: Iterable[D],
        *,
        waiting: Sequence[Iterable[D]] = (),
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        history: History | None = None,
    ) -> Ordering[D]:
        given, backlog = list(documents), [list(others) for others in waiting]
        # Retrieval order is not arranged for waiting requests.
        first, second = ([], backlog) if self.shadow else (backlog, [])
        start = time.perf_counter()
        served = self._orderer.order(given, waiting=first, scope=scope, lengths=lengths, history=history)
        between, other = time.perf_counter(), None
        if self._other is not None:
            other = self._other.order(given, waiting=second, scope=scope, lengths=lengths, history=history)
        return self._watch(served, other, between - start, time.perf_counter() - between)

    def order_batch(
        self,
        requests: Iterable[Iterable[D]],
        *,
        scope: Hashable = None,
        lengths: Lengths = USUAL,
        max_wait: int | None = None,
    ) -> Batch[D]:
        given = [list(documents) for documents in requests]
        first, second = (0, max_wait) if self.shadow else (max_wait, 0)
        served, other = self._orderer.order_batch(given, scope=scope, lengths=lengths, max_wait=first), None
        if self._other is not None:
            other = self._other.order_batch(given, scope=scope, lengths=lengths, max_wait=second)
        return Batch(served.indices, partial(self._start, served, other))

    def _start(self, batch: Batch[D], others: Batch[D] | None, place: int) -> Ordering[D]:
        start = time.perf_counter()
        served = batch[place]
        between = time.perf_counter()
        other = None if others is None else others[place]
        return self._watch(served, other, between - start, time.perf_counter() - between)

    def has_lost(self, history: History, *, scope: Hashable = None) -> bool:
        """Return False in shadow mode, which never rebases."""
        return not self.shadow and self._orderer.has_lost(history, scope=scope)

    def fall_back(self, documents: Iterable[D], error: Exception) -> Ordering[D]:
        return self._watch(self._orderer.fall_back(documents, error), None, 0.0, 0.0)

    def close(self) -> None:
        self._own.close()

    @property
    def _ours(self) -> Orderer:
        return self._other if self.shadow and self._other else self._orderer

    def _watch(self, served: Ordering[D], other: Ordering[D] | None, served_s: float, other_s: float) -> Ordering[D]:
        try:
            ours, plain = (other, served) if self.shadow else (served, other)
            observation = Observation(
                shadow=self.shadow,
                documents=len(served.documents),
                documents_end=served.documents_end,
                ordered_tokens=None if ours is None else ours.cached_tokens,
                retrieval_tokens=None if plain is None else plain.cached_tokens,
                moves=Moves.of((), 0) if ours is None else ours.moves,
                order_s=other_s if self.shadow else served_s,
                fallback=(served if ours is None else ours).fallback,
                ordered_cost=None if ours is None else ours.cost,
                retrieval_cost=None if plain is None else plain.cost,
            )
            callbacks = [watcher.ordered(observation) for watcher in self._watchers]
        except Exception as error:
            self._report(error)
            return served
        if other is not None:
            served.twins += (other,)
        served.add_done_callback(lambda outcome: self._finish(outcome, other, callbacks))
        return served

    def _finish(
        self,
        outcome: RequestOutcome,
        other: Ordering[Any] | None,
        callbacks: Iterable[Callable[[RequestOutcome], None]],
    ) -> None:
        try:
            if other is not None and outcome.served:
                other.confirm(total_tokens=outcome.total_tokens)
            elif other is not None:
                other.discard()
            for finished in callbacks:
                finished(outcome)
        except Exception as error:
            self._report(error)

    def _report(self, error: Exception) -> None:
        if self._own.settings.strict:
            raise error
        if not self._failed:
            self._failed = True
            _logger.warning(
                "a watcher of the orderer failed with %s: later failures are not logged", type(error).__name__
            )


def predict_reuse(
    orderer: Orderer, requests: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]
) -> tuple[int, int, int]:
    """Return all requests' tokens up to the last document, and those cached in ragorder's and in retrieval order."""
    other = orderer.clone(**_PLAIN)
    tokens = ordered = retrieval = 0
    for documents, options in requests:
        ours, theirs = orderer.order(documents, **options), other.order(documents, **options)
        tokens += ours.documents_end
        ordered += ours.cached_tokens
        retrieval += theirs.cached_tokens
        ours.confirm()
        theirs.confirm()
    return tokens, ordered, retrieval


def _unwatched(orderer: Orderer, shadow: bool, compare: bool) -> ObservedOrderer:
    observed = ObservedOrderer(orderer, shadow=shadow, compare=compare)
    observed.degrade("an unpickled ObservedOrderer has no watchers: give it some in this process")
    return observed
