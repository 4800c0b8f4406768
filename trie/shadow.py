"""Tree of a cache under a policy that need not be the one that is served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["Shadow"]

_MAX_REQUESTS = 4096


class Shadow:
    """What the engine would hold, had all requests been served in the orders given to `serve`.

        shadow = Shadow(prefix_tokens=64)
        found = search.find(shadow.tree, ranks)  # a path that is held
        shadow.serve(found, keys, tokens, order, stamp=2)  # the rest of the order, after that path
        shadow.forget(before=2)

    A path is held for as long as the engine holds what was last used at the same time, and at most the last 4,096 are.
    """

    def __init__(self, prefix_tokens: int = 0) -> None:
        self.tree = KnowledgeTree(1)
        self.tree.root = _HeldNode(None, None, prefix_tokens, 0)
        self._uses: deque[tuple[int, Node]] = deque()

    def serve(self, found: Node, keys: Sequence[Key], tokens: Sequence[int], rest: Sequence[int], stamp: int) -> None:
        """Documents `keys[i]` of `tokens[i]` tokens are served after the path to `found`, for each i in `rest`. Stamps
        grow."""
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
        """Evict what was last used before that stamp."""
        uses = self._uses
        while uses and uses[0][0] < before:
            _, node = uses.popleft()
            # No child was used after its parent.
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
