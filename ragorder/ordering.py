"""Result of ordering one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, TypeVar, overload

from ragorder.common.counts import reported_count
from ragorder.common.lock import run_or_defer
from ragorder.trie.residency import Lease

if TYPE_CHECKING:
    from ragorder.clouds.prices import Cost
    from ragorder.clouds.request import CloudRequest
    from ragorder.trie.tail import Tail

D = TypeVar("D")

Reuse = Literal["exact", "fused", "computed"]
"""The engine reuses a document in an exact prefix, reuses a copy, or computes it."""


class Moves(NamedTuple):
    """Distance of a prompt's documents from retrieval order."""

    reordered: bool
    cold: bool
    """Whether documents move although none should be cached."""
    best_moved: bool
    """Whether the best document is not first."""
    places: float
    """Mean distance of a document from its rank."""

    @classmethod
    def of(cls, permutation: Sequence[int], cached_documents: int) -> Moves:
        distances = [abs(place - rank) for place, rank in enumerate(permutation)]
        reordered = any(distances)
        places = sum(distances) / len(distances) if distances else 0.0
        return cls(reordered, reordered and not cached_documents, bool(distances and distances[0]), places)


class RequestOutcome(NamedTuple):
    """A request's end, with reported token counts."""

    served: bool
    cached_tokens: float | None = None
    total_tokens: float | None = None
    prompt_tokens: float | None = None

    @property
    def cost(self) -> Cost | None:
        return None


class CloudOutcome(RequestOutcome):
    """The cost is no item: callers unpack four."""

    paid: Cost | None = None

    @property
    def cost(self) -> Cost | None:
        return self.paid


@dataclass(slots=True, eq=False, repr=False)
class Ordering(Generic[D]):
    """A request's documents in prompt order. Call `confirm` after the answer, `discard` after a failure.

        ordering = orderer.order(documents)
        ordering.confirm(generate(question, ordering.documents).cached_tokens)

    - `permutation`: for each place, the retrieval rank (from 0) of its document
    - `prefix_documents`: leading documents that the engine should hold
    - `cached_tokens`: prompt tokens that it should reuse, with the system prompt
    - `host_tokens`, `disk_tokens`: cached tokens to load from host memory or disk
    - `documents_end`: prompt tokens up to the end of the last document
    - `guard_cost_tokens`: cached tokens that the guards cost
    - `index`: position of the request in the input of its batch
    - `fused`: places of reused copies (`reuse="fused"`)
    - `exact_documents`: leading documents that the engine must compute exactly
    - `fallback`: retrieval order after an internal error
    - `cloud`: breakpoints and cost at a cloud (`Orderer.for_cloud`)
    """

    documents: list[D]
    permutation: Sequence[int]
    prefix_documents: int = 0
    cached_tokens: int = 0
    guard_cost_tokens: int = 0
    # No closure: callers keep many orderings, and the garbage collector visits each object.
    _finish: Callable[[Any, RequestOutcome], None] | None = None
    _lease: object = None
    documents_end: int = 0
    _forecast: Tail | None = None
    _keys: Sequence[Hashable] = ()
    host_tokens: int = field(default=0, init=False)
    disk_tokens: int = field(default=0, init=False)
    fused: Sequence[int] = field(default=(), init=False)
    exact_documents: int = field(default=0, init=False)
    cloud: CloudRequest | None = field(default=None, init=False)
    index: int = field(default=0, init=False)
    fallback: bool = field(default=False, init=False)
    # Orderings of the same request by other orderers, for comparison.
    twins: tuple[Ordering[Any], ...] = field(default=(), init=False)
    _observers: tuple[Callable[[RequestOutcome], None], ...] = field(default=(), init=False)

    def __repr__(self) -> str:
        return (
            f"Ordering({len(self.documents)} documents, permutation={list(self.permutation)}, "
            f"prefix_documents={self.prefix_documents}, cached_tokens={self.cached_tokens})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Ordering is a request in flight at its orderer and cannot be copied: "
            "copy ordering.documents and ordering.permutation instead"
        )

    @property
    def expected_uses(self) -> Sequence[float]:
        """For each place, the expected requests with all documents up to it, or nothing without a forecast."""
        if self._forecast is None:
            return ()
        keys = self._keys
        return self._forecast.expected_uses([keys[rank] for rank in self.permutation])

    @property
    def reuse(self) -> list[Reuse]:
        """For each place, the source of its KV."""
        kinds: list[Reuse] = [
            "exact" if place < self.prefix_documents else "computed" for place in range(len(self.permutation))
        ]
        for place in self.fused:
            kinds[place] = "fused"
        return kinds

    @property
    def breakpoints(self) -> Sequence[int]:
        """For a cloud, the number of documents before each breakpoint; 0: after the system prompt."""
        return self.cloud.breakpoints if self.cloud is not None else ()

    @property
    def cost(self) -> Cost | None:
        """The prompt's cost at a cloud: predicted, and after `confirm` as reported."""
        return self.cloud.cost if self.cloud is not None else None

    @property
    def moves(self) -> Moves:
        return Moves.of(self.permutation, self.prefix_documents)

    def confirm(
        self,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        *,
        prompt_tokens: float | None = None,
        written_tokens: float | None = None,
    ) -> None:
        """Record that the engine served the request, with its reported token counts.

        `total_tokens` are prompt and answer, `written_tokens` those written into a cloud's cache. Only the first
        `confirm` or `discard` counts.
        """
        cached_tokens, total_tokens = reported_count(cached_tokens), reported_count(total_tokens)
        prompt_tokens, written_tokens = reported_count(prompt_tokens), reported_count(written_tokens)
        if self.cloud is not None and self._finish is not None:
            self.cloud.report(cached_tokens, written_tokens, prompt_tokens)
        if (cost := self.cost) is None:
            self._end(RequestOutcome(True, cached_tokens, total_tokens, prompt_tokens))
        else:
            outcome = CloudOutcome(True, cached_tokens, total_tokens, prompt_tokens)
            outcome.paid = cost
            self._end(outcome)

    def readable(self) -> None:
        """Record the answer's first token: others can now read its entries in a cloud's cache. Optional."""
        if self.cloud is not None:
            self.cloud.readable()
        for twin in self.twins:
            twin.readable()

    def discard(self) -> None:
        """Record that the request failed or was never sent."""
        self._end(RequestOutcome(False))

    def set_history_keys(self, message: str, answer: str = "", *, closing_tokens: int = 0) -> None:
        """Set the keys (`Segment.key`) by which later turns find message and answer. Call it before `confirm`.

        `closing_tokens`: template text after the answer.
        """
        for twin in self.twins:
            twin.set_history_keys(message, answer, closing_tokens=closing_tokens)
        turn = self._lease.turn if isinstance(self._lease, Lease) else None
        if turn is not None:
            turn.message, turn.answer, turn.closing_tokens = message, answer, closing_tokens

    def add_done_callback(self, observer: Callable[[RequestOutcome], None]) -> None:
        """Call `observer` once, at the first `confirm` or `discard`. It must not raise, and may take locks."""
        self._observers += (observer,)

    def _end(self, outcome: RequestOutcome) -> None:
        observers, self._observers = self._observers, ()
        self.twins = ()
        finish = self._finish
        try:
            if finish is not None:
                finish(self._lease, outcome)
                self._finish = None
        finally:
            for observer in observers:
                run_or_defer(partial(observer, outcome))


class Batch(Sequence[Ordering[D]], Generic[D]):
    """Orderings in serving order.

        for ordering in orderer.order_batch(requests):
            serve(requests[ordering.index], ordering.documents)

    Access puts an ordering in flight, so serve while iterating.
    """

    def __init__(self, indices: Sequence[int], start: Callable[[int], Ordering[D]]) -> None:
        self.indices = indices
        self._start = start
        self._started: dict[int, Ordering[D]] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Ordering[D]]:
        return (self[place] for place in range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Ordering[D]: ...
    @overload
    def __getitem__(self, place: slice) -> list[Ordering[D]]: ...
    def __getitem__(self, place: int | slice) -> Ordering[D] | list[Ordering[D]]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        place = range(len(self))[place]
        ordering = self._started.get(place)
        if ordering is None:
            ordering = self._started[place] = self._start(place)
        return ordering
