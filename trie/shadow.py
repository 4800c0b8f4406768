"""Simulated cache of a policy that is not served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["Shadow"]

_MAX_REQUESTS = 4096


class Shadow:
    """The engine's contents if all requests had been served in the orders given to `serve`.

        shadow = Shadow(prefix_tokens=64)
        found = search.find(shadow.tree, ranks)  # a cached path
        shadow.serve(found, keys, tokens, order, stamp=2)  # the rest of the order, after that path
        shadow.forget(before=2)

    At most the last 4,096 paths are kept.
    """

    def __init__(self, prefix_tokens: int = 0) -> None:
        self.tree = KnowledgeTree(1)
        self.tree.root = _HeldNode(None, None, prefix_tokens, 0)
        self._uses: deque[tuple[int, Node]] = deque()

    def serve(self, found: Node, keys: Sequence[Key], tokens: Sequence[int], rest: Sequence[int], stamp: int) -> None:
        """Serve documents `keys[i]`, for i in `rest`, after the path to `found`. Stamps must increase."""
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
                child = children[key] = _HeldNode(key, node, node.end + tokens[i], stamp)
            else:
                child.stamp = stamp
            node = child
        self._uses.append((stamp, node))
        if len(self._uses) > _MAX_REQUESTS:
            self.forget(self._uses[0][0] + 1)

    @property
    def oldest(self) -> int:
        return self._uses[0][0] if self._uses else 0

    def forget(self, before: int) -> None:
        uses = self._uses
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


class _HeldNode(Node):
    __slots__ = ()

    def __init__(self, key: Key, parent: Node | None, end: int, stamp: int) -> None:
        self.key = key
        self.parent = parent
        self.children = None
        self.end = end
        self.missing = 0
        self.stamp = stamp
