"""Scope of an orderer: a knowledge tree with its residency, prefix search and tail policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from copy import copy as shallow_copy
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ragorder._best import BestPlace
from ragorder._earned import EarnedMoves
from ragorder._fused import FusedPlaces, FusedReuse
from ragorder._request import OrderRequest
from ragorder._tiers import EngineTiers
from ragorder.guards import RequestGuards
from ragorder.ordering import Ordering, RequestOutcome
from ragorder.settings import Settings
from ragorder.trie.histories import KnownSegments
from ragorder.trie.plan import CachedPath
from ragorder.trie.residency import (
    EngineBlocks,
    EventsResidency,
    FeedbackResidency,
    FollowedPool,
    LearnedLengths,
    Lease,
    LRUResidency,
    Places,
    Pool,
    Residency,
    ScopeLengths,
    TokenIds,
)
from ragorder.trie.search import PrefixSearch, Rest, ranks_on_path, searches
from ragorder.trie.search.base import Permits
from ragorder.trie.tail import EarnedTail, Tail, Waiting, tails
from ragorder.trie.tree import KnowledgeTree, Node

__all__ = ["EngineContents", "Scope", "ScopeOwner"]

D = TypeVar("D")


class EngineContents(NamedTuple):
    blocks: EngineBlocks
    prefix_ids: TokenIds


class ScopeOwner(Protocol):
    tiers: EngineTiers
    segments: KnownSegments
    """Of all conversations."""
    defer: Callable[[Callable[[], None]], None]
    """Calls an outcome in its turn."""

    def changed(self) -> None: ...


class Scope:
    """The engine's cache for one (model, template, tenant). The caller serialises all calls but `finish`."""

    def __init__(
        self,
        name: Hashable,
        settings: Settings,
        owner: ScopeOwner,
        pool: Pool,
        contents: EngineContents | None = None,
        lengths: ScopeLengths | None = None,
    ) -> None:
        self.name = name
        self._owner = owner
        self.best = BestPlace(settings)
        self._guards = settings.guards or None
        self._suffix_tokens = settings.suffix_tokens
        fuses = settings.reuse == "fused"
        self.tree = KnowledgeTree(settings.block_size, settings.prefix_tokens, indexed=fuses)
        self.mirror = _make_mirror(name, self.tree, pool, contents, owner.tiers)
        self._lengths = LearnedLengths().of(name) if lengths is None else lengths
        self.residency: Residency = FeedbackResidency(self.mirror, self._lengths) if settings.feedback else self.mirror
        self.places: Places | None = owner.tiers.places(self.mirror)
        self.priced = owner.tiers.priced(self.places)
        self._search_budget = settings.search_budget
        self.search: PrefixSearch = searches[settings.search](settings.search_budget)
        self.tail: Tail = tails[settings.moves].from_settings(settings)
        self.earned = EarnedMoves(settings, self.search, self.tail) if isinstance(self.tail, EarnedTail) else None
        self.fused = FusedReuse(settings, self.tree, self.tail) if fuses else None

    @property
    def whole(self) -> bool:
        """False while the scope changes, and after an error or an interrupt in a change."""
        return self.mirror.whole

    @whole.setter
    def whole(self, whole: bool) -> None:
        self.mirror.whole = whole

    def order(self, request: OrderRequest[D], waiting: Waiting, suffix_tokens: int | None) -> Ordering[D]:
        self.residency.refresh(request)
        if request.fixed is None:
            self.tail.observe(request)
        permutation, guard_cost_tokens = self._arrange(request, waiting)
        return self._begin(request, permutation, guard_cost_tokens, suffix_tokens)

    def copy(self) -> Scope:
        """An independent scope that continues from here; nothing corrects its mirror."""
        self.residency.refresh()
        copy = shallow_copy(self)
        copy._owner = _DetachedOwner(self._owner)
        copy.mirror = copy.residency = self.mirror.copy()
        # A dry run finds the blocks where they are now, and moves none.
        copy.places = None
        copy.tree = copy.mirror.tree
        copy.tail = self.tail.copy()
        # What pays now is known; a copy is too short-lived to learn more.
        copy.earned = None
        copy.fused = None if self.fused is None else self.fused.copy(copy.tree, copy.tail)
        return copy

    def preview(self, request: OrderRequest[D], waiting: Waiting) -> list[int]:
        self.residency.refresh(request)
        with self.tail.observing(request):
            return self._arrange(request, waiting)[0]

    def predict_cached_tokens(self, request: OrderRequest[D]) -> tuple[int, int]:
        self.residency.refresh(request)
        guards = None if self._guards is None else self._guards.for_request(len(request.keys), request.groups)
        node = self._choose(request, guards)
        return max(0, self.tree.cached_tokens(node)), self.tree.root.end + sum(self._tokens(request))

    def holds_prefix(self) -> bool:
        self.residency.refresh()
        return self.mirror.holds(self.tree.root)

    def cached_path(self, request: OrderRequest[D]) -> CachedPath:
        tree = self.tree
        self.residency.refresh(request)
        node = self._find(request)
        keys = tuple(request.keys[rank] for rank in ranks_on_path(node, request.ranks))
        return CachedPath(keys, max(0, tree.cached_tokens(node) - tree.root.end), node.stamp)

    def start(self, request: OrderRequest[D], planned: list[int], suffix_tokens: int | None) -> Ordering[D]:
        self.residency.refresh()
        self.tail.observe(request)
        if self._guards is not None:
            planned = self._guards.for_request(len(planned), request.groups).complete((), planned)
        return self._begin(request, planned, 0, suffix_tokens)

    def record(self, request: OrderRequest[D], permutation: list[int], suffix_tokens: int | None) -> None:
        """A request that was served elsewhere, in the order of its guards."""
        self.residency.refresh(request)
        self.tail.observe(request)
        self._begin(request, permutation, 0, suffix_tokens).confirm()

    def finish(
        self,
        lease: Lease,
        outcome: RequestOutcome,
        documents_end: int | None = None,
        fused: FusedPlaces | None = None,
    ) -> None:
        """End a lease. Callable by any thread at any time; never waits. `documents_end`, if that is not the path's."""
        served, *reported = outcome
        self._owner.defer(partial(self._end, lease, served, reported, documents_end, fused))

    def _end(
        self,
        lease: Lease,
        served: bool,
        reported: Sequence[float | None],
        documents_end: int | None = None,
        fused: FusedPlaces | None = None,
    ) -> None:
        # A forgotten or half changed scope has no requests any more.
        if self.mirror.closed or not self.whole:
            return
        self.whole = False
        if served:
            self.tail.served(lease.path)
            if documents_end is not None and lease.open:
                cached_tokens, _, prompt_tokens = reported
                if prompt_tokens is not None and isinstance(self.residency, FeedbackResidency):
                    self.residency.learn_prompt(documents_end - self.tree.root.end, prompt_tokens)
                # Nothing behind the exact documents is kept.
                reported = [cached_tokens, lease.path[-1].end]
            self.residency.release(lease, *reported)
        else:
            if self.fused is not None and fused is not None and lease.open:
                self.fused.investment.cancel(lease.path, fused.invested)
            self.residency.cancel(lease)
        self._owner.changed()
        self.whole = True

    def close(self) -> None:
        self.mirror.close()

    def _tokens(self, request: OrderRequest[D]) -> Sequence[int]:
        return self._lengths.scale(request.tokens) if request.estimated else request.tokens

    def _find(self, request: OrderRequest[D], permits: Permits | None = None) -> Node:
        node = self.search.find(self.tree, request.ranks, permits)
        if self.priced is None:
            return node
        tokens = self._tokens(request)
        if self.fused is not None:
            rest = self.fused.rest(request.keys, tokens, self.places)
        else:
            prompt_tokens = self.tree.root.end + sum(tokens)
            rest = Rest(prompt_tokens.__sub__)
        return self.priced.improve(node, self.tree, request.ranks, rest, permits)

    def _choose(self, request: OrderRequest[D], guards: RequestGuards | None = None) -> Node:
        return self.best.choose(partial(self._find, request), self.tree, request.ranks, guards)

    def _arrange(self, request: OrderRequest[D], waiting: Waiting) -> tuple[list[int], int]:
        if request.fixed is not None:
            return request.fixed, 0
        tree, ranks = self.tree, request.ranks
        node = self._choose(request)
        if self._guards is None:
            return self._complete(ranks_on_path(node, ranks), request, waiting), 0
        guards = self._guards.for_request(len(ranks), request.groups)
        guarded = self._choose(request, guards)
        cost = max(0, tree.cached_tokens(node) - tree.cached_tokens(guarded))
        prefix = ranks_on_path(guarded, ranks)
        return guards.complete(prefix, self._complete(prefix, request, waiting)), cost

    def _complete(self, prefix: list[int], request: OrderRequest[D], waiting: Waiting) -> list[int]:
        count = len(request.keys)
        if len(prefix) == count:
            return prefix
        placed = set(prefix)
        rest = [rank for rank in range(count) if rank not in placed]
        first, rest, last = self.best.split(prefix, rest)
        taken_over: list[int] = []
        if self.fused is not None:
            # Nothing after a document that is taken over is kept: it never stands before one to compute.
            if first and self.fused.has_copy(request.keys[0]):
                first, rest = [], first + rest
            invested, rest, taken_over = self.fused.split(request, self._tokens(request), prefix + first, rest)
            first += invested
        exact = prefix + first
        return exact + self.tail.arrange(request, exact, rest, waiting) + taken_over + last

    def _begin(
        self,
        request: OrderRequest[D],
        permutation: list[int],
        guard_cost_tokens: int,
        suffix_tokens: int | None,
    ) -> Ordering[D]:
        keys, tokens = request.keys, self._tokens(request)
        suffix_tokens = self._suffix_tokens if suffix_tokens is None else suffix_tokens
        kept, behind_tokens, fused = permutation, 0, None
        if self.fused is not None:
            fused = self.fused.places(request, tokens, permutation)
            kept = permutation[: fused.exact]
            behind_tokens = sum(tokens[rank] for rank in permutation[fused.exact :])
        path = self.tree.insert(keys, tokens, kept)
        token_ids = request.token_ids
        if token_ids:
            token_ids = [token_ids[rank] for rank in kept]
        lease = self.residency.lease(path, suffix_tokens + behind_tokens, token_ids)
        self._measure(request, tokens, lease)
        documents = request.documents
        ordering = Ordering(
            [documents[rank] for rank in permutation],
            permutation,
            lease.cached_documents,
            lease.cached_tokens,
            guard_cost_tokens,
            self.finish
            if fused is None
            else partial(self.finish, fused=fused, documents_end=path[-1].end + behind_tokens),
            lease,
            path[-1].end + behind_tokens,
            self.tail,
            keys,
        )
        if fused is not None and self.fused is not None:
            ordering.fused, ordering.exact_documents = fused.taken_over, fused.exact_documents
            copied = sum(tokens[permutation[place]] for place in fused.taken_over)
            self.fused.investment.begin(path, lease.cached_documents, fused.invested, copied)
        self._place(path, lease, ordering)
        return ordering

    def _measure(self, request: OrderRequest[D], tokens: Sequence[int], lease: Lease) -> None:
        if self.earned is not None and request.fixed is None:
            self.earned.observe(request, tokens, lease.stamp, self.mirror.pool.held_since)

    def _place(self, path: Sequence[Node], lease: Lease, ordering: Ordering[D]) -> None:
        """Count what is loaded from slower tiers."""
        if self.places is None:
            return
        for node in path[1 : 1 + lease.cached_documents]:
            host, disk = self.places.loads(node)
            ordering.host_tokens += host * self.tree.block_size
            ordering.disk_tokens += disk * self.tree.block_size
        self.places.serve(path, lease, lambda: ordering.expected_uses)


class _DetachedOwner:
    def __init__(self, owner: ScopeOwner) -> None:
        self.tiers = owner.tiers
        self.segments = owner.segments
        self.defer: Callable[[Callable[[], None]], None] = _at_once

    def changed(self) -> None:
        pass


def _at_once(outcome: Callable[[], None]) -> None:
    outcome()


def _make_mirror(
    name: Hashable, tree: KnowledgeTree, pool: Pool, contents: EngineContents | None, tiers: EngineTiers
) -> LRUResidency:
    # The salt of a scope that is no string is unknown: its blocks cannot be identified.
    if contents is not None and isinstance(pool, FollowedPool) and (name is None or (isinstance(name, str) and name)):
        return EventsResidency(tree, pool, prefix_ids=contents.prefix_ids, salt=name)
    return tiers.residency(name, tree, pool)
