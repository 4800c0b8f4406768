"""One scope of the orderer: a knowledge tree with its residency, its prefix search and its tail policy."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Generic, NamedTuple, TypeVar

from ragorder.ordering import Ordering
from ragorder.settings import Settings
from ragorder.trie.backlog import CachedPath
from ragorder.trie.residency import (
    EngineBlocks,
    EventsResidency,
    FeedbackResidency,
    Lease,
    LRUResidency,
    NoResidency,
    Residency,
    TokenIds,
)
from ragorder.trie.search import BestPathSearch, GreedySearch, PrefixSearch, ranks_on_path
from ragorder.trie.tail import AutoTail, FrequencyTail, QueueTail, RankTail, Tail, Waiting
from ragorder.trie.tree import Key, KnowledgeTree

__all__ = ["Contents", "Request", "Scope"]

D = TypeVar("D")

_ESTIMATES_EXCEED = 4 / 3


class Request(Generic[D]):
    """A request's documents in rank order, with what the tree must know of each. Keys are distinct. `estimated`: their
    lengths are, at so many characters a token."""

    __slots__ = ("documents", "estimated", "groups", "keys", "ranks", "token_ids", "tokens")

    def __init__(
        self,
        documents: list[D],
        keys: Sequence[Key],
        ranks: Mapping[Key, int],
        tokens: Sequence[int],
        groups: Sequence[Hashable | None],
        token_ids: Sequence[TokenIds] = (),
        estimated: bool = False,
    ) -> None:
        self.documents = documents
        self.estimated = estimated
        self.keys = keys
        self.ranks = ranks
        self.tokens = tokens
        self.groups = groups
        self.token_ids = token_ids


class Contents(NamedTuple):
    """What the engine holds, block by block, and how this orderer's prompts begin."""

    blocks: EngineBlocks
    prefix_ids: TokenIds


class Scope:
    """What one (model, template, tenant) has in the engine's cache. The caller holds `lock` but for `settle`."""

    def __init__(
        self,
        name: Hashable,
        settings: Settings,
        lock: Lock,
        report: Callable[[Exception], None],
        contents: Contents | None = None,
    ) -> None:
        self._lock = lock
        self._report = report
        self._guards = settings.guards or None
        self._suffix_tokens = settings.suffix_tokens
        self.tree = KnowledgeTree(settings.block_size, settings.prefix_tokens)
        self.mirror = _make_mirror(name, settings, self.tree, contents)
        self.residency: Residency = FeedbackResidency(self.mirror) if settings.feedback else self.mirror
        self.search = _make_search(settings)
        self.tail = _make_tail(settings)

    def order(self, request: Request[D], waiting: Waiting, suffix_tokens: int | None) -> Ordering[D]:
        """Order one request and count it as in flight."""
        self.residency.refresh()
        self.tail.observe(request.keys)
        permutation, guard_cost_tokens = self._arrange(request, waiting)
        return self._begin(request, permutation, guard_cost_tokens, suffix_tokens)

    def preview(self, request: Request[D], waiting: Waiting) -> list[int]:
        """The permutation that `order` would give now. Nothing is recorded."""
        self.residency.refresh()
        with self.tail.observing(request.keys):
            return self._arrange(request, waiting)[0]

    def foretell(self, request: Request[D]) -> tuple[int, int]:
        """(cached tokens, tokens up to the end of the documents) of the request if it were ordered now. Nothing is
        recorded."""
        self.residency.refresh()
        permits = None if self._guards is None else self._guards.for_request(len(request.keys), request.groups).permits
        node = self.search.find(self.tree, request.ranks, permits)
        return max(0, self.tree.cached_tokens(node)), self.tree.root.end + sum(request.tokens)

    def holds_prefix(self) -> bool:
        """Whether what stands in front of the documents is held, or being computed, or fills no block."""
        self.residency.refresh()
        return self.mirror.holds(self.tree.root)

    def cached_path(self, request: Request[D]) -> CachedPath:
        """The best cached path of a request."""
        tree = self.tree
        self.residency.refresh()
        node = self.search.find(tree, request.ranks)
        keys = tuple(request.keys[rank] for rank in ranks_on_path(node, request.ranks))
        return CachedPath(keys, max(0, tree.cached_tokens(node) - tree.root.end), node.stamp)

    def start(self, request: Request[D], planned: list[int], suffix_tokens: int | None) -> Ordering[D]:
        """Count a planned request as in flight."""
        self.residency.refresh()
        self.tail.observe(request.keys)
        if self._guards is not None:
            planned = self._guards.for_request(len(planned), request.groups).complete((), planned)
        return self._begin(request, planned, 0, suffix_tokens)

    def settle(self, lease: Lease, served: bool, cached_tokens: float | None, total_tokens: float | None) -> None:
        """End a lease."""
        try:
            if cached_tokens is not None:
                cached_tokens += 0.0
            if total_tokens is not None:
                total_tokens = float(int(total_tokens))
        except (TypeError, ValueError, OverflowError) as error:
            cached_tokens = total_tokens = None
            self._report(error)
        try:
            with self._lock:
                if served:
                    self.residency.release(lease, cached_tokens, total_tokens)
                else:
                    self.residency.cancel(lease)
        except Exception as error:
            self._report(error)

    def settle_roughly(
        self, lease: Lease, served: bool, cached_tokens: float | None, total_tokens: float | None
    ) -> None:
        """End a lease whose lengths were estimated: only a report that contradicts them clearly says that anything is
        gone, and of the answer's length there is no telling."""
        with suppress(TypeError):
            cached_tokens = None if cached_tokens is None else cached_tokens * _ESTIMATES_EXCEED
        self.settle(lease, served, cached_tokens, None)

    def close(self) -> None:
        """The scope is forgotten."""
        if isinstance(self.mirror, EventsResidency):
            self.mirror.close()

    def _arrange(self, request: Request[D], waiting: Waiting) -> tuple[list[int], int]:
        """The permutation, and the cached tokens that guards cost."""
        tree, keys, ranks = self.tree, request.keys, request.ranks
        node = self.search.find(tree, ranks)
        if self._guards is None:
            return self._complete(ranks_on_path(node, ranks), keys, waiting), 0
        guards = self._guards.for_request(len(keys), request.groups)
        guarded = self.search.find(tree, ranks, guards.permits)
        cost = max(0, tree.cached_tokens(node) - tree.cached_tokens(guarded))
        prefix = ranks_on_path(guarded, ranks)
        return guards.complete(prefix, self._complete(prefix, keys, waiting)), cost

    def _complete(self, prefix: list[int], keys: Sequence[Key], waiting: Waiting) -> list[int]:
        if len(prefix) == len(keys):
            return prefix
        placed = set(prefix)
        rest = [rank for rank in range(len(keys)) if rank not in placed]
        return prefix + self.tail.arrange(keys, prefix, rest, waiting)

    def _begin(
        self, request: Request[D], permutation: list[int], guard_cost_tokens: int, suffix_tokens: int | None
    ) -> Ordering[D]:
        path = self.tree.insert(request.keys, request.tokens, permutation)
        suffix_tokens = self._suffix_tokens if suffix_tokens is None else suffix_tokens
        token_ids = request.token_ids
        if token_ids:
            token_ids = [token_ids[rank] for rank in permutation]
        lease = self.residency.lease(path, suffix_tokens, token_ids)
        documents = request.documents
        return Ordering(
            [documents[rank] for rank in permutation],
            permutation,
            lease.cached_documents,
            lease.cached_tokens,
            guard_cost_tokens,
            self.settle_roughly if request.estimated else self.settle,
            lease,
            path[-1].end,
        )


def _make_mirror(name: Hashable, settings: Settings, tree: KnowledgeTree, contents: Contents | None) -> LRUResidency:
    if settings.residency == "none":
        return NoResidency(tree, settings.max_nodes)
    mirrored = tree, settings.capacity_tokens, settings.max_nodes, settings.partial_blocks_first
    # What salt the requests of a scope with another name carry, nobody knows: its blocks cannot be told apart.
    if contents is not None and (name is None or (isinstance(name, str) and name)):
        return EventsResidency(*mirrored, blocks=contents.blocks, prefix_ids=contents.prefix_ids, salt=name)
    return LRUResidency(*mirrored)


def _make_search(settings: Settings) -> PrefixSearch:
    return (
        GreedySearch(settings.search_budget) if settings.search == "greedy" else BestPathSearch(settings.search_budget)
    )


def _make_tail(settings: Settings) -> Tail:
    if settings.tail == "rank":
        return RankTail()
    if settings.tail == "frequency":
        return FrequencyTail()
    return QueueTail(RankTail()) if settings.tail == "queue" else AutoTail()
