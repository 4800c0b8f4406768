"""Scope of an orderer: a knowledge tree with its policies."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from copy import copy as shallow_copy
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, TypeVarTuple

from ragorder.common.counts import Estimate, KnownTokens
from ragorder.guards import RequestGuards
from ragorder.ordering import Ordering, RequestOutcome
from ragorder.scope.moves import BestPlace, EarnedMoves
from ragorder.scope.request import OrderRequest
from ragorder.scope.tiers import EngineTiers
from ragorder.settings import Settings
from ragorder.trie.histories import Histories, History, KnownSegments, TurnEnd, find_below, held_tokens
from ragorder.trie.residency import (
    FeedbackResidency,
    KnowsTiers,
    LearnedLengths,
    Lease,
    LRUResidency,
    Pool,
    ScopeLengths,
    TokenIds,
)
from ragorder.trie.search import SEARCH_BUDGET, Permits, PrefixSearch, Rest, ranks_on_path, searches
from ragorder.trie.tail import EarnedTail, Tail, Waiting, tails
from ragorder.trie.tree import KnowledgeTree, Node

if TYPE_CHECKING:
    from ragorder.scope.fused import FusedPlaces, FusedReuse
    from ragorder.trie.plan import CachedPath
    from ragorder.trie.residency.blocks import EngineBlocks

D = TypeVar("D")
Arguments = TypeVarTuple("Arguments")


class EngineContents(NamedTuple):
    """Without `prefix_ids` each request's prefix has its own (`KnownTokens`)."""

    blocks: EngineBlocks
    prefix_ids: TokenIds | None


class ScopeOwner(Protocol):
    tiers: EngineTiers
    segments: KnownSegments
    defer: Callable[[Callable[[], None]], None]
    """Runs an outcome when the scope is free."""

    def changed(self) -> None: ...


class Scope:
    """The engine's cache for one (model, template, tenant). Only `finish` and `defer` may be called concurrently.

    Documents after a history keep retrieval order, except for the best one and those that the engine holds in another
    order. `follows_histories`: the engine can resume anywhere. `rebases`: evicted conversations may be rebased.
    """

    follows_histories = True
    rebases = True
    _histories: Histories | None = None

    def __init__(
        self,
        name: Hashable,
        settings: Settings,
        owner: ScopeOwner,
        pool: Pool,
        contents: EngineContents | None = None,
        lengths: ScopeLengths | None = None,
    ) -> None:
        prefix = _prefix_of(name, settings, contents)
        if isinstance(settings.prefix_tokens, KnownTokens):
            # A scope outlives its request: it keeps the digests of the prefix alone.
            settings = settings.model_copy(update={"prefix_tokens": int(settings.prefix_tokens)})
        self.name = name
        self._owner = owner
        self.best = BestPlace(settings)
        self._guards = settings.guards or None
        self._suffix_tokens = settings.suffix_tokens
        fuses = settings.reuse == "fused"
        self.tree = KnowledgeTree(settings.block_size, settings.prefix_tokens, indexed=fuses)
        self.mirror = _make_mirror(name, self.tree, pool, prefix, owner.tiers)
        self._lengths = LearnedLengths().of(name) if lengths is None else lengths
        self.residency: FeedbackResidency | LRUResidency = self.mirror
        if settings.feedback:
            self.residency = FeedbackResidency(self.mirror, self._lengths)
        self.places: KnowsTiers | None = owner.tiers.places(self.mirror)
        self.priced = owner.tiers.priced(self.places)
        self.search: PrefixSearch = searches[settings.search](SEARCH_BUDGET)
        self.tail: Tail = tails[settings.moves].from_settings(settings)
        self.earned: EarnedMoves | None = None
        if isinstance(self.tail, EarnedTail):
            self.earned = EarnedMoves(settings, self.search, self.tail.fallback)
        self.fused: FusedReuse | None = None
        if fuses:
            from ragorder.scope.fused import FusedReuse

            self.fused = FusedReuse(settings, self.tree, self.tail)

    @property
    def whole(self) -> bool:
        """False during a change, and after an error or interrupt in one."""
        return self.mirror.whole

    @whole.setter
    def whole(self, whole: bool) -> None:
        self.mirror.whole = whole

    def order(
        self,
        request: OrderRequest[D],
        waiting: Waiting = (),
        suffix_tokens: int | None = None,
        history: History | None = None,
    ) -> Ordering[D]:
        if history is not None and history.segments:
            self.residency.refresh()
        else:
            self.residency.refresh(request)
            if request.sent is None:
                self.tail.observe(request)
        permutation, guard_cost_tokens = self._arrange(request, waiting, history)
        return self._begin(request, permutation, guard_cost_tokens, suffix_tokens, history)

    def copy(self, *, learns: bool = True) -> Scope:
        """Return an independent scope. Reports do not correct its mirror. Unless it `learns`, it keeps the present
        verdict on whether moves on a forecast pay."""
        self.residency.refresh()
        copy = shallow_copy(self)
        copy._owner = _DetachedOwner(self._owner)
        copy.mirror = copy.residency = self.mirror.copy()
        # A dry run moves no blocks between tiers.
        copy.places = None
        copy.tree = copy.mirror.tree
        copy.tail = self.tail.copy()
        if self.earned is not None and isinstance(copy.tail, EarnedTail):
            copy.earned = self.earned.copy(copy.tail.fallback) if learns else None
        copy.fused = None if self.fused is None else self.fused.copy(copy.tree, copy.tail)
        return copy

    def preview(self, request: OrderRequest[D], waiting: Waiting = (), history: History | None = None) -> list[int]:
        after = history is not None and bool(history.segments)
        self.residency.refresh(None if after else request)
        with nullcontext() if after else self.tail.observing(request):
            return self._arrange(request, waiting, history)[0]

    def predict_cached_tokens(self, request: OrderRequest[D], history: History | None = None) -> tuple[int, int]:
        end = self.tree.root.end + sum(self._tokens(request))
        if history is None:
            self.residency.refresh(request)
            guards = None if self._guards is None else self._guards.for_request(len(request.keys), request.groups)
            return max(0, self.tree.cached_tokens(self._choose(request, guards))), end
        permutation = self.preview(request, (), history)
        path = [self.tree.root]
        if self._follows:
            path = self.histories.known_path(history, [request.keys[rank] for rank in permutation])
        end += sum(self._lengths_of(request, history))
        return self._reusable(held_tokens(self.tree, path), path, history), end

    def has_lost(self, history: History) -> bool:
        self.residency.refresh()
        return self.rebases and self._follows and self.histories.has_lost(history)

    @property
    def histories(self) -> Histories:
        if self._histories is None:
            self._histories = Histories(self.tree, self._owner.segments)
        return self._histories

    def holds_prefix(self) -> bool:
        self.residency.refresh()
        return self.mirror.holds(self.tree.root)

    def cached_path(self, request: OrderRequest[D]) -> CachedPath:
        from ragorder.trie.plan import CachedPath

        tree = self.tree
        self.residency.refresh(request)
        node = self._find(request)
        keys = tuple(request.keys[rank] for rank in ranks_on_path(node, request.ranks))
        return CachedPath(keys, max(0, tree.cached_tokens(node) - tree.root.end), node.stamp)

    def start(self, request: OrderRequest[D], planned: list[int], suffix_tokens: int | None = None) -> Ordering[D]:
        self.residency.refresh()
        self.tail.observe(request)
        if self._guards is not None:
            planned = self._guards.for_request(len(planned), request.groups).complete((), planned)
        return self._begin(request, planned, 0, suffix_tokens)

    def record(self, request: OrderRequest[D], permutation: list[int], suffix_tokens: int | None = None) -> None:
        self.residency.refresh(request)
        self.tail.observe(request)
        self._begin(request, permutation, 0, suffix_tokens).confirm()

    def finish(
        self, lease: Lease, outcome: RequestOutcome, documents_end: int | None = None, fused: FusedPlaces | None = None
    ) -> None:
        """End a lease, as `defer` does. `documents_end`: end of the documents, if it differs from the path's."""
        served, *reported = outcome
        self.defer(self._end, lease, served, reported, documents_end, fused)

    def defer(self, work: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Change the mirror once the scope is free. Any thread may call this; it never waits."""
        self._owner.defer(partial(self._change, work, *arguments))

    def _change(self, work: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        # A dropped or damaged scope has no requests.
        if self.mirror.closed or not self.whole:
            return
        self.whole = False
        work(*arguments)
        self.whole = True

    def _end(
        self,
        lease: Lease,
        served: bool,
        reported: Sequence[float | None],
        documents_end: int | None,
        fused: FusedPlaces | None,
    ) -> None:
        if served:
            self.tail.served(lease.path)
            if documents_end is not None and lease.open:
                cached_tokens, _, prompt_tokens = reported
                if prompt_tokens is not None and isinstance(self.residency, FeedbackResidency):
                    self.residency.learn_prompt(documents_end - self.tree.root.end, prompt_tokens)
                # The engine keeps nothing after the exact documents.
                reported = [cached_tokens, lease.path[-1].end]
            self.residency.release(lease, *reported)
        else:
            if self.fused is not None and fused is not None and lease.open:
                self.fused.investment.cancel(lease.path, fused.invested)
            self.residency.cancel(lease)
        self._owner.changed()

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

    @property
    def _follows(self) -> bool:
        # Reused copies and everything after them are not an exact prefix.
        return self.follows_histories and self.fused is None

    def _arrange(
        self, request: OrderRequest[D], waiting: Waiting, history: History | None = None
    ) -> tuple[list[int], int]:
        if request.sent is not None:
            return request.sent, 0
        guards = None if self._guards is None else self._guards.for_request(len(request.keys), request.groups)
        if history is not None and history.segments:
            return self._arrange_after(history, request, guards), 0
        tree, ranks = self.tree, request.ranks
        node = self._choose(request)
        if guards is None:
            return self._complete(ranks_on_path(node, ranks), request, waiting), 0
        guarded = self._choose(request, guards)
        cost = max(0, tree.cached_tokens(node) - tree.cached_tokens(guarded))
        prefix = ranks_on_path(guarded, ranks)
        return guards.complete(prefix, self._complete(prefix, request, waiting)), cost

    def _arrange_after(self, history: History, request: OrderRequest[D], guards: RequestGuards | None) -> list[int]:
        prefix: list[int] = []
        if self._follows and (end := self.histories.end(history)) is not None:
            permits = None if guards is None else guards.permits
            ranks = {key: rank for rank, key in enumerate(history.document_keys(request.keys))}
            prefix = find_below(self.tree, end, ranks, SEARCH_BUDGET, permits)
        placed = set(prefix)
        first, rest, last = self.best.split(prefix, [rank for rank in range(len(request.keys)) if rank not in placed])
        arranged = prefix + first + rest + last
        return arranged if guards is None else guards.complete(prefix, arranged)

    def _complete(self, prefix: list[int], request: OrderRequest[D], waiting: Waiting) -> list[int]:
        count = len(request.keys)
        if len(prefix) == count:
            return prefix
        placed = set(prefix)
        rest = [rank for rank in range(count) if rank not in placed]
        first, rest, last = self.best.split(prefix, rest)
        reused: list[int] = []
        if self.fused is not None:
            # The engine keeps nothing after a reused document, so it never comes before one to compute.
            if first and self.fused.has_copy(request.keys[0]):
                first, rest = [], first + rest
            invested, rest, reused = self.fused.split(request, self._tokens(request), prefix + first, rest)
            first += invested
        exact = prefix + first
        return exact + self.tail.arrange(request, exact, rest, waiting) + reused + last

    def _begin(
        self,
        request: OrderRequest[D],
        permutation: list[int],
        guard_cost_tokens: int,
        suffix_tokens: int | None = None,
        history: History | None = None,
    ) -> Ordering[D]:
        tokens = self._tokens(request)
        if suffix_tokens is None:
            suffix_tokens = self._suffix_tokens
        after, fused = False, None
        if history is None or not (history.segments or self._follows):
            kept, reused_tokens = permutation, 0
            if self.fused is not None:
                fused = self.fused.places(request, tokens, permutation)
                kept = permutation[: fused.exact]
                reused_tokens = sum(tokens[rank] for rank in permutation[fused.exact :])
            path = self.tree.insert(request.keys, tokens, kept)
            end = path[-1].end + reused_tokens
            token_ids = [request.token_ids[rank] for rank in kept] if request.token_ids else ()
            lease = self.residency.lease(path, suffix_tokens + reused_tokens, token_ids)
            held, cached_tokens = lease.cached_documents, lease.cached_tokens
        else:
            after = bool(history.segments)
            path, turn, end, lease = self._begin_turn(history, request, tokens, permutation, suffix_tokens)
            held = 0 if turn is None else max(0, min(lease.cached_documents, turn.documents) - turn.history_nodes)
            cached_tokens = self._reusable(lease.cached_tokens, path, history)
        if not after and self.earned is not None and request.sent is None:
            self.earned.observe(request, tokens, lease.stamp, self.mirror.pool.held_since)
        ordering = Ordering(
            [request.documents[rank] for rank in permutation],
            permutation,
            held,
            cached_tokens,
            guard_cost_tokens,
            self.finish if fused is None else partial(self.finish, fused=fused, documents_end=end),
            lease,
            end,
            None if after else self.tail,
            () if after else request.keys,
        )
        if fused is not None and self.fused is not None:
            ordering.fused, ordering.exact_documents = fused.reused, fused.exact_documents
            copied = sum(tokens[permutation[place]] for place in fused.reused)
            self.fused.investment.begin(path, lease.cached_documents, fused.invested, copied)
        self._annotate(ordering, path, lease)
        return ordering

    def _begin_turn(
        self,
        history: History,
        request: OrderRequest[D],
        tokens: Sequence[int],
        permutation: list[int],
        suffix_tokens: int,
    ) -> tuple[list[Node], TurnEnd | None, int, Lease]:
        lengths = self._lengths_of(request, history)
        if not self._follows:
            # No later request finds any part of it.
            root = self.tree.root
            rest = sum(lengths[: len(history.segments)]) + sum(tokens)
            return [root], None, root.end + rest, self.residency.lease([root], suffix_tokens + rest)
        path, turn = self.histories.insert(history, lengths, request.keys, tokens, permutation)
        # The question's node has its tokens.
        asked = 0 if history.question is None else path[-1].end - path[-2].end
        # The tokens of a history are unknown: only the mirror follows what comes after it.
        known = request.token_ids and not history.segments
        token_ids = [request.token_ids[rank] for rank in permutation] if known else ()
        lease = self.residency.lease(path, max(0, suffix_tokens - asked), token_ids, turn)
        return path, turn, path[turn.documents].end, lease

    def _reusable(self, held_tokens: int, path: Sequence[Node], history: History) -> int:
        """Return the held tokens without the block of the prompt's last token, which engines always compute."""
        if history.question is None:
            return held_tokens
        size = self.tree.block_size
        return min(held_tokens, max(0, path[-1].end - 1) // size * size)

    def _lengths_of(self, request: OrderRequest[D], history: History) -> Sequence[int]:
        asked = [] if history.question is None else [history.question]
        lengths = [segment.tokens for segment in (*history.segments, *asked, *history.following)]
        return self._lengths.scale(lengths) if request.estimated or Estimate in map(type, lengths) else lengths

    def _annotate(self, ordering: Ordering[D], path: Sequence[Node], lease: Lease) -> None:
        """Add what the engine's tiers say of a request."""
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
        self.defer: Callable[[Callable[[], None]], None] = lambda outcome: outcome()

    def changed(self) -> None: ...


def _prefix_of(name: Hashable, settings: Settings, contents: EngineContents | None) -> KnownTokens | None:
    """Return the tokens before the documents, or None if blocks cannot be identified."""
    if contents is None:
        return None
    if contents.prefix_ids is None:
        return settings.prefix_tokens if isinstance(settings.prefix_tokens, KnownTokens) else None
    # Without a string as scope the salt is unknown.
    if name is None or (isinstance(name, str) and name):
        return KnownTokens(contents.prefix_ids, name)
    return None


def _make_mirror(
    name: Hashable, tree: KnowledgeTree, pool: Pool, prefix: KnownTokens | None, tiers: EngineTiers
) -> LRUResidency:
    if prefix is not None:
        from ragorder.trie.residency.events import EventsResidency
        from ragorder.trie.residency.followed import FollowedPool

        if isinstance(pool, FollowedPool):
            return EventsResidency(tree, pool, prefix_ids=prefix.ids, salt=prefix.salt)
    return tiers.residency(name, tree, pool)
