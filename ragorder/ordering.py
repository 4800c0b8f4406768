"""Result of ordering one request."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, NoReturn, Protocol, TypeVar

from ragorder._deferred import run_or_defer
from ragorder.counts import reported_count
from ragorder.trie.residency import Lease

if TYPE_CHECKING:
    from ragorder.clouds.cost import Cost
    from ragorder.clouds.request import CloudRequest

__all__ = ["Forecast", "Moves", "Ordering", "RequestOutcome", "Reuse"]

D = TypeVar("D")

Reuse = Literal["exact", "fused", "computed"]
"""The engine reuses a document as part of an exact prefix, takes it over from elsewhere, or computes it."""


class Moves(NamedTuple):
    """How far a prompt's documents stand from retrieval order."""

    reordered: bool
    """Whether any document moves."""
    cold: bool
    """Whether any moves although no document should be cached."""
    best_moved: bool
    """Whether another document than the best one stands first."""
    places: float
    """Mean distance of a document from its retrieval rank."""

    @classmethod
    def of(cls, permutation: Sequence[int], cached_documents: int) -> Moves:
        distances = [abs(place - rank) for place, rank in enumerate(permutation)]
        reordered = any(distances)
        places = sum(distances) / len(distances) if distances else 0.0
        return cls(reordered, reordered and not cached_documents, bool(distances and distances[0]), places)


class RequestOutcome(NamedTuple):
    """The end of a request, with the token counts that the engine reported."""

    served: bool
    cached_tokens: float | None = None
    total_tokens: float | None = None
    prompt_tokens: float | None = None

    @property
    def cost(self) -> Cost | None:
        """Of a request to a cloud."""
        return None


class CloudOutcome(RequestOutcome):
    """The same of a request to a cloud, whose cost is no item of the tuple: callers unpack four."""

    paid: Cost | None = None

    @property
    def cost(self) -> Cost | None:
        return self.paid


class Forecast(Protocol):
    def expected_uses(self, keys: Sequence[Hashable]) -> Sequence[float]:
        """Requests to come that will contain the first document, the first two, …; empty without a forecast."""


class Ordering(Generic[D]):
    """A request's documents in prompt order. Call `confirm` after the answer, `discard` after a failure.

        ordering = orderer.order(documents)
        ordering.confirm(generate(question, ordering.documents).cached_tokens)

    - `documents`: the caller's own, permuted
    - `permutation`: for each place, the retrieval rank (from 0) of its document
    - `prefix_documents`: leading documents that the engine should hold
    - `cached_tokens`: prompt tokens that it should reuse, system prompt included
    - `host_tokens`, `disk_tokens`: of these, documents' tokens to be loaded from there
    - `documents_end`: prompt tokens up to the end of the last document
    - `guard_cost_tokens`: cached tokens that the guards cost
    - `index`: position of the request in its batch
    - `fused`: places of the documents to be taken over from elsewhere (`reuse="fused"`)
    - `exact_documents`: leading documents that the engine computes exactly even if it could take them over
    - `fallback`: an internal error left retrieval order
    - `cloud`: marks of a request to a cloud (`Orderer.for_cloud`)
    """

    __slots__ = (
        "_finish",
        "_forecast",
        "_keys",
        "_lease",
        "_observers",
        "cached_tokens",
        "cloud",
        "disk_tokens",
        "documents",
        "documents_end",
        "exact_documents",
        "fallback",
        "fused",
        "guard_cost_tokens",
        "host_tokens",
        "index",
        "permutation",
        "prefix_documents",
        "twins",
    )

    def __init__(
        self,
        documents: list[D],
        permutation: Sequence[int],
        prefix_documents: int = 0,
        cached_tokens: int = 0,
        guard_cost_tokens: int = 0,
        finish: Callable[[Any, RequestOutcome], None] | None = None,
        lease: object = None,
        documents_end: int = 0,
        forecast: Forecast | None = None,
        keys: Sequence[Hashable] = (),
    ) -> None:
        self.documents = documents
        self.permutation = permutation
        self.prefix_documents = prefix_documents
        self.cached_tokens = cached_tokens
        self.documents_end = documents_end
        # Not a closure of them: callers keep many orderings, and the garbage collector visits each object.
        self._forecast = forecast
        self._keys = keys
        self.guard_cost_tokens = guard_cost_tokens
        self.host_tokens = self.disk_tokens = 0
        self.fused: Sequence[int] = ()
        self.exact_documents = 0
        self.cloud: CloudRequest | None = None
        self.index = 0
        self.fallback = False
        # Of the same request at other orderers, for comparison.
        self.twins: tuple[Ordering[Any], ...] = ()
        self._finish = finish
        self._lease = lease
        self._observers: tuple[Callable[[RequestOutcome], None], ...] = ()

    def __repr__(self) -> str:
        return (
            f"Ordering({len(self.documents)} documents, permutation={list(self.permutation)}, "
            f"prefix_documents={self.prefix_documents}, cached_tokens={self.cached_tokens})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Ordering stands for a request in flight at its orderer, so that there cannot be two of it: "
            "copy ordering.documents and ordering.permutation instead"
        )

    @property
    def expected_uses(self) -> Sequence[float]:
        """For each place, the requests to come that will contain all documents up to it, by what is known now; empty
        without a forecast."""
        if self._forecast is None:
            return ()
        keys = self._keys
        return self._forecast.expected_uses([keys[rank] for rank in self.permutation])

    @property
    def reuse(self) -> list[Reuse]:
        """For each place, where its KV comes from."""
        kinds: list[Reuse] = [
            "exact" if place < self.prefix_documents else "computed" for place in range(len(self.permutation))
        ]
        for place in self.fused:
            kinds[place] = "fused"
        return kinds

    @property
    def breakpoints(self) -> Sequence[int]:
        """For a cloud, the documents in front of each mark to be set; 0: behind the system prompt."""
        return self.cloud.breakpoints if self.cloud is not None else ()

    @property
    def cost(self) -> Cost | None:
        """What the prompt costs at a cloud: as predicted, and once it is confirmed as reported. None elsewhere."""
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
        """The engine served the request. As far as reported: `cached_tokens` reused, `total_tokens` of prompt and
        answer, `prompt_tokens`; by a cloud also `written_tokens` into its cache. What is no number of tokens counts as
        not reported. The first `confirm` or `discard` counts, later ones do nothing: what ends a request and what
        cleans up after it need not know of each other."""
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
        """The answer's first token is there: from now on others can read what this request writes into a cloud's cache.
        Without effect elsewhere, and not needed before `confirm`."""
        if self.cloud is not None:
            self.cloud.readable()
        for twin in self.twins:
            twin.readable()

    def discard(self) -> None:
        """The request failed or was never sent."""
        self._end(RequestOutcome(False))

    def remember_as(self, message: str, answer: str = "", *, closing_tokens: int = 0) -> None:
        """The keys (`Segment.key`) by which later histories name this request's message and its answer, with
        `closing_tokens` of template text behind that: what the engine keeps of them is then found again. Before
        `confirm`."""
        for twin in self.twins:
            twin.remember_as(message, answer, closing_tokens=closing_tokens)
        turn = self._lease.turn if isinstance(self._lease, Lease) else None
        if turn is not None:
            turn.message, turn.answer, turn.closing_tokens = message, answer, closing_tokens

    def add_done_callback(self, observer: Callable[[RequestOutcome], None]) -> None:
        """Call `observer` once, at the first `confirm` or `discard`. It must not raise. It may take locks: an outcome
        from a finaliser reaches it with the next call of this package."""
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
