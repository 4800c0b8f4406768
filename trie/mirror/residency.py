"""Residency in an engine's tiers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from ragorder.trie.histories import TurnEnd
from ragorder.trie.mirror.pool import TieredPool
from ragorder.trie.mirror.tiers import Arrival, TierPriority
from ragorder.trie.residency import Lease, Loads, LRUResidency, TierLevel
from ragorder.trie.residency.base import Reported
from ragorder.trie.tree import KnowledgeTree, Node

_NOTHING = Loads()


class TieredResidency(LRUResidency):
    """The nodes of one scope's tree in the engine's tiers.

    A node's key there is a hash of its path: it outlives the tree, as KV does. Scopes of equal names share keys.
    """

    pool: TieredPool

    def __init__(self, tree: KnowledgeTree, pool: TieredPool, scope: Hashable) -> None:
        super().__init__(tree, pool)
        self._scope = hash((scope,))
        self._keys: dict[Node, int] = {}
        # By request in flight, the priorities of the last node that it should find cached, as they were before it.
        self._priorities: dict[Lease, Sequence[TierPriority]] = {}

    def refresh(self, requested: object = None) -> None:
        self.pool.refresh(self)

    def serve(self, path: Sequence[Node], lease: Lease, expected_uses: Callable[[], Sequence[float]]) -> None:
        if not lease.open:
            self._drop_absent(path)
            return
        pool, keys = self.pool, self._keys
        arrivals: list[Arrival] = []
        key, parent, start = self._scope, None, 0
        for node in path:
            key = hash((key, node.key))
            keys[node] = key
            pool.nodes_by_key[key] = self, node
            # Documents of size 0 would never fill the tiers.
            arrivals.append(Arrival(key, max(1, node.end - start), parent))
            parent, start = key, node.end
        in_order = [arrival.key for arrival in arrivals]
        held = lease.cached_documents + 1 if lease.cached_tokens else 0
        self._priorities[lease] = pool.mirror.priorities(in_order[held - 1]) if held else ()
        pool.serve(
            lease,
            arrivals,
            self,
            suffix_tokens=lease.suffix_blocks * self.tree.block_size,
            computed=frozenset(in_order[held:]),
            expected=dict(zip(in_order[1:], expected_uses(), strict=False)),
        )

    def release(self, lease: Lease, *reported: Reported, **named: Reported) -> None:
        path = lease.path
        super().release(lease, *reported, **named)
        self._settle(lease, path)

    def cancel(self, lease: Lease) -> None:
        path = lease.path
        super().cancel(lease)
        self._settle(lease, path)

    def _keep_answer(self, lease: Lease, turn: TurnEnd, total_tokens: float | None) -> None:
        """Ignore the answer: the tiers count only the room of its tokens."""

    def correct(self, lease: Lease, *, alone: bool = False) -> int | None:
        kept = frozenset(map(self._key, lease.path))
        only = frozenset(self._keys.values()) if alone else None
        return self.pool.evict_before(self._priorities.get(lease, ()), self, kept, only)

    def loads(self, node: Node) -> Loads:
        place = self.pool.mirror.place(self._key(node))
        if place is TierLevel.DEVICE:
            return _NOTHING
        held = node.blocks - node.missing
        return Loads(held, 0) if place is TierLevel.HOST else Loads(0, held)

    def close(self) -> None:
        super().close()
        for lease in self._priorities:
            self.pool.mirror.settle(lease)
        self._priorities.clear()
        for node in list(self._keys):
            self._unlink(node)

    def _key(self, node: Node) -> int:
        if node in self._keys:
            return self._keys[node]
        return hash((self._scope if node.parent is None else self._key(node.parent), node.key))

    def _settle(self, lease: Lease, path: Sequence[Node]) -> None:
        if self._priorities.pop(lease, None) is not None:
            self.pool.mirror.settle(lease)
            self._drop_absent(path)

    def _drop_absent(self, path: Sequence[Node]) -> None:
        mirror = self.pool.mirror
        for node in path:
            if node.stamp and not node.leases and self._key(node) not in mirror:
                self.pool.drop(self, node, self)
                return

    def _remove(self, node: Node) -> None:
        self.tree.remove(node)
        if node in self._keys:
            self.pool.mirror.remove(self._keys[node])
            self._unlink(node)

    def _unlink(self, node: Node) -> None:
        key = self._keys.pop(node)
        known = self.pool.nodes_by_key.get(key)
        if known is not None and known[1] is node:
            del self.pool.nodes_by_key[key]
