"""Plans a batch from what the engine already holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ragorder.trie.plan import plan
from ragorder.trie.search import PrefixSearch
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["plan_backlog"]

Planned = tuple[int, list[Key]]


def plan_backlog(
    requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int], tree: KnowledgeTree, search: PrefixSearch
) -> list[Planned]:
    """(request, its documents in order) in serving order, for a cache that holds what the tree says.

    Requests that gain more from a cached path than from their place in a plan from scratch are served first, before
    what they need is evicted: least recently used paths first, those on one path together.
    """
    planned = plan(requests, tokens)
    if not tree.root.children or tree.root.missing:
        return planned
    on_path: dict[Node, list[int]] = {}
    rest: list[Planned] = []
    for place, (index, order) in enumerate(planned):
        node = search.find(tree, {key: rank for rank, key in enumerate(requests[index])})
        before = rest[-1][1] if rest else []
        after = planned[place + 1][1] if place + 1 < len(planned) else []
        cost = _shared(before, order, tokens) + _shared(order, after, tokens) - _shared(before, after, tokens)
        if tree.cached_tokens(node) - tree.root.end > cost:
            on_path.setdefault(node, []).append(index)
        else:
            rest.append((index, order))
    return _extend_paths(on_path, requests, tokens) + rest


def _extend_paths(
    on_path: Mapping[Node, Sequence[int]], requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int]
) -> list[Planned]:
    extended = []
    for node in sorted(on_path, key=lambda node: node.stamp):
        path = _keys(node)
        placed = set(path)
        indices = on_path[node]
        beyond = plan([[key for key in requests[index] if key not in placed] for index in indices], tokens)
        extended += [(indices[number], path + order) for number, order in beyond]
    return extended


def _keys(node: Node) -> list[Key]:
    keys = []
    while node.parent is not None:
        keys.append(node.key)
        node = node.parent
    keys.reverse()
    return keys


def _shared(one: Sequence[Key], other: Sequence[Key], tokens: Mapping[Key, int]) -> int:
    shared = 0
    for key, opposite in zip(one, other, strict=False):
        if key != opposite:
            break
        shared += tokens[key]
    return shared
