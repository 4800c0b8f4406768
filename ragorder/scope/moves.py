"""Measurement of the tokens saved by moves on a forecast."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import copy as shallow_copy
from functools import partial
from typing import Any, Self

from ragorder.guards import RequestGuards
from ragorder.scope.request import OrderRequest
from ragorder.settings import Settings
from ragorder.trie.search import Permits, PrefixSearch, ranks_on_path
from ragorder.trie.tail import GatedTail
from ragorder.trie.tree import Key, KnowledgeTree, Node

_MAX_REQUESTS = 4096


class Shadow:
    """The engine's contents if requests had been served in the orders given to `serve`: the last 4,096 paths."""

    def __init__(self, prefix_tokens: int = 0) -> None:
        self.tree = KnowledgeTree(1)
        self.tree.root = _HeldNode(None, None, prefix_tokens, 0)
        self.uses: deque[tuple[int, Node]] = deque()
        """Stamps and ends of the kept paths, oldest first."""

    def serve(self, found: Node, keys: Sequence[Key], tokens: Sequence[int], rest: Sequence[int], stamp: int) -> None:
        """Serve `keys[i]`, for i in `rest`, after the path to `found`. Stamps must increase."""
        node: Node | None = found
        while node is not None:
            node.stamp = stamp
            node = node.parent
        node = found
        for i in rest:
            key, children = keys[i], node.children
            child = None
            if children is None:
                children = node.children = {}
            else:
                child = children.get(key)
            if child is None:
                # Without the call of __init__: this is on the path of each request.
                child = children[key] = _new(_HeldNode)
                child.key, child.parent, child.children, child.missing = key, node, None, 0
                child.end = node.end + tokens[i]
            child.stamp = stamp
            node = child
        uses = self.uses
        uses.append((stamp, node))
        if len(uses) > _MAX_REQUESTS:
            self.evict(uses[0][0] + 1)

    def evict(self, before: int) -> None:
        uses = self.uses
        while uses and uses[0][0] < before:
            _, node = uses.popleft()
            # A parent is used at least as recently as its children.
            while node.parent is not None and node.stamp < before:
                parent, siblings = node.parent, node.parent.children
                if siblings is None or siblings.get(node.key) is not node:
                    break
                if len(siblings) == 1:
                    parent.children = None
                else:
                    del siblings[node.key]
                node = parent

    def copy(self) -> Self:
        copy = shallow_copy(self)
        copy.tree = KnowledgeTree(1)
        root = copy.tree.root = _HeldNode(None, None, self.tree.root.end, 0)
        root.stamp = self.tree.root.stamp
        copies, left = {self.tree.root: root}, [self.tree.root]
        while left:
            node = left.pop()
            if not node.children:
                continue
            made = copies[node]
            children = made.children = {}
            for key, child in node.children.items():
                copies[child] = children[key] = new = _new(_HeldNode)
                new.key, new.parent, new.children, new.missing = key, made, None, 0
                new.end, new.stamp = child.end, child.stamp
            left += node.children.values()
        copy.uses = deque((stamp, copies[node]) for stamp, node in self.uses)
        return copy


class _HeldNode(Node):
    __slots__ = ()


_new = _HeldNode.__new__


class BestPlace:
    """Position at which the model reads the most relevant document best: "first", or "last".

    A request loses at most `best_tokens` cached tokens for it; otherwise "last" is the most relevant document after the
    cached prefix.
    """

    def __init__(self, settings: Settings) -> None:
        self.end = settings.best
        self.price = settings.best_tokens

    def choose(
        self,
        find: Callable[[Permits | None], Node],
        tree: KnowledgeTree,
        ranks: Mapping[Key, int],
        guards: RequestGuards | None,
    ) -> Node:
        permits = None if guards is None else guards.permits
        longest = find(permits)
        count = len(ranks)
        if self.end == "any" or self._permits(count, None, ranks_on_path(longest, ranks)):
            return longest
        if guards is not None and not self._permits(count, None, guards.complete((), self.order(count))):
            return longest
        other = find(partial(self._permits, count, permits))
        return other if tree.cached_tokens(longest) - tree.cached_tokens(other) <= self.price else longest

    def _permits(self, count: int, others: Permits | None, ranks: Sequence[int]) -> bool:
        permitted = ranks[:1] in ([], [0]) if self.end == "first" else 0 not in ranks[: count - 1]
        return permitted and (others is None or others(ranks))

    def split(self, prefix: Sequence[int], rest: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Split the ranks in `rest`, which follow `prefix`: first ones, those for a tail to arrange, last ones."""
        if self.end == "last":
            return [], rest[1:], rest[:1]
        held = 1 if self.end == "first" and not prefix else 0
        return rest[:held], rest[held:], []

    def order(self, count: int) -> list[int]:
        first, middle, last = self.split((), [*range(count)])
        return first + middle + last


_WORTH = 0.02
"""Share of a prompt's tokens that each prompt moved on a forecast must save."""

_DECAY = 0.995
_PRIOR_PROMPTS = 3


class EarnedMoves:
    """Compares, in shadow trees, moves on the tail's forecast with moves into the cached prefix only.

    Set dueling (Qureshi et al., ISCA 2007): the forecast pays while it finds 2 % of a prompt's tokens more for each
    prompt that only it moves, over about 200 requests.
    """

    def __init__(self, settings: Settings, search: PrefixSearch, tail: GatedTail) -> None:
        self._find = search.find
        self._tail = tail
        self._best = BestPlace(settings)
        self._guards = settings.guards or None
        self._is_free = settings.best == "any" and self._guards is None
        self._prefix_tokens = settings.prefix_tokens
        self._moved, self._ranked = Shadow(settings.prefix_tokens), Shadow(settings.prefix_tokens)
        self._gain = 0.0
        self._prompts = 0.0

    def copy(self, tail: GatedTail) -> Self:
        """Return an independent measurement, for a copy of the tail."""
        copy = shallow_copy(self)
        copy._tail = tail
        copy._moved, copy._ranked = self._moved.copy(), self._ranked.copy()
        return copy

    def observe(self, request: OrderRequest[Any], tokens: Sequence[int], stamp: int, held_since: int) -> None:
        saved, moves = self._serve(self._moved, request, tokens, stamp, held_since)
        otherwise_saved, otherwise_moves = self._serve(self._ranked, request, tokens, stamp, held_since)
        gain = (saved - otherwise_saved) / max(1, self._prefix_tokens + sum(tokens)) if saved != otherwise_saved else 0
        self._gain = _DECAY * self._gain + gain
        self._prompts = _DECAY * self._prompts + moves - otherwise_moves
        self._tail.pays = self._gain > _WORTH * (max(0.0, self._prompts) + _PRIOR_PROMPTS)

    def _serve(
        self, shadow: Shadow, request: OrderRequest[Any], tokens: Sequence[int], stamp: int, held_since: int
    ) -> tuple[int, bool]:
        """Return the tokens found, and whether the prompt leaves the order that it would have without a cache."""
        uses = shadow.uses
        if uses and uses[0][0] < held_since:
            shadow.evict(held_since)
        keys, ranks = request.keys, request.ranks
        ranked = [*range(len(keys))]
        if self._is_free:
            # The usual settings, without the calls: this is on the path of each request.
            found = self._find(shadow.tree, ranks)
            prefix = ranks_on_path(found, ranks)
            rest = _without(ranked, prefix) if prefix else ranked
            order = prefix + self._rest(shadow, request, prefix, rest)
        else:
            guards = None if self._guards is None else self._guards.for_request(len(keys), request.groups)
            found = self._best.choose(partial(self._find, shadow.tree, ranks), shadow.tree, ranks, guards)
            prefix = ranks_on_path(found, ranks)
            first, rest, last = self._best.split(prefix, _without(ranked, prefix))
            order = prefix + first + self._rest(shadow, request, prefix + first, rest) + last
            if guards is not None:
                order = guards.complete(prefix, order)
            ranked = self._best.order(len(keys))
        shadow.serve(found, keys, tokens, order[len(prefix) :], stamp)
        return found.end, order != ranked

    def _rest(self, shadow: Shadow, request: OrderRequest[Any], placed: Sequence[int], rest: list[int]) -> list[int]:
        return self._tail.forecast(request, placed, rest) if rest and shadow is self._moved else rest


def _without(ranks: Sequence[int], placed: Sequence[int]) -> list[int]:
    done = set(placed)
    return [rank for rank in ranks if rank not in done]
