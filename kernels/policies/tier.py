"""What one tier holds of the knowledge tree, and what of it goes first (Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from heapq import heappop, heappush

from ragorder.kernels.policies.base import ReplacementPolicy, TierNode
from ragorder.kernels.policies.heap import Entry, NodeHeap
from ragorder.kernels.policies.history import History
from ragorder.trie.tree import Key

__all__ = ["Tier"]


class Tier:
    """The nodes that one tier holds: metadata only, of bytes it knows nothing. `used` is the sum of their sizes.

    Leaves go first, of these the one with the lowest priority; a parent is a candidate once its last child in the tier
    is gone. Keys are any hashable things but None, each stands for one node of the tree wherever it is used, and the
    parents make a tree: a node whose parent is not in the tier is one without a parent until that comes (back).

    A node that comes in starts with what the history knows of it, or with frequency 0 and cost 0. So without a history
    a request's nodes are inserted before `use` counts the request; with one, either comes first.

    `use` takes O(log n) a node, `insert`, `remove`, `pin` and `unpin` O(log n), `evict` O(log n) a node that goes or is
    protected, at the worst and not only on average. A node takes about 0.4 KB beside its key. Not thread-safe.
    Raises ValueError if the history is another tier's.
    """

    def __init__(self, policy: ReplacementPolicy, history: History | None = None) -> None:
        if history is not None:
            if history.owned:
                raise ValueError("a history belongs to one tier: make another one")
            history.owned = True
        self.used = 0
        self._policy = policy
        self._history = history
        self._nodes: dict[Key, TierNode] = {}
        # Leaves that are not pinned.
        self._candidates = NodeHeap()
        # How many nodes have a parent that is not here, by its key.
        self._parted: dict[Key, int] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: Key) -> bool:
        return key in self._nodes

    def get(self, key: Key) -> TierNode | None:
        """What the tier knows of a node that it holds: to be read only."""
        return self._nodes.get(key)

    def use(self, path: Sequence[Key], *, cost: float | None = None, computed: Container[Key] = ()) -> None:
        """A request went along this path, root first. Nodes that the tier does not hold count in the history.

        The request computed those in `computed`, they were not cached for it, at `cost` seconds a new token: T(alpha,
        beta) / beta, with alpha cached and beta new tokens of the request (formula 4). A node that no request has
        computed yet, as it came from elsewhere, takes the cost of this one as an estimate until one does.
        Raises ValueError, and counts nothing, if the cost is negative or not finite.
        """
        if cost is not None and not 0 <= cost < math.inf:
            raise ValueError(f"a cost of {cost} s a token cannot be: give 0 or more, and a finite number")
        history = self._history
        for key in path:
            node = self._nodes.get(key)
            if node is not None:
                self._count(node, cost, key in computed)
                self._weigh(node)
            elif history is not None:
                node = history.take(key) or TierNode(key)
                self._count(node, cost, key in computed)
                history.keep(node)

    def insert(self, key: Key, size: int = 1, parent: Key | None = None, *, known: TierNode | None = None) -> None:
        """The node has come into the tier, behind `parent`, which need not be there.

        `known` is what another tier knows of it: frequency and cost are taken over if this tier knows less.
        Raises ValueError, and changes nothing, if it is there already, is its own parent, or has a negative size.
        """
        if key in self._nodes:
            raise ValueError("the tier holds this node already")
        if key == parent:
            raise ValueError("a node cannot be its own parent")
        if size < 0:
            raise ValueError(f"a node of size {size} cannot be: give 0 or more")
        node = (self._history.take(key) if self._history is not None else None) or TierNode(key)
        if known is not None and known.frequency > node.frequency:
            node.frequency, node.misses, node.cost = known.frequency, known.misses, known.cost
        node.size, node.parent = size, parent
        node.children = self._parted.pop(key, 0)
        self._nodes[key] = node
        self.used += size
        holder = None
        if parent is not None:
            holder = self._nodes.get(parent)
            if holder is None:
                self._parted[parent] = self._parted.get(parent, 0) + 1
            else:
                holder.children += 1
        self._uses += 1
        node.order = self._uses
        self._weigh(node)
        self._change_candidates(holder, node)

    def remove(self, key: Key) -> None:
        """The node has gone for another reason, pinned or not; its children stay. Raises KeyError if it is not here."""
        self._take_out(self._nodes[key])

    def pin(self, key: Key) -> None:
        """Keep the node until it was unpinned as often as pinned. Raises KeyError if it is not there."""
        node = self._nodes[key]
        node.pins += 1
        self._change_candidates(node, None)

    def unpin(self, key: Key) -> None:
        """Take back one pin. Raises KeyError if the node is not there, ValueError if it is not pinned."""
        node = self._nodes[key]
        if not node.pins:
            raise ValueError("the node is not pinned")
        node.pins -= 1
        self._change_candidates(None, node)

    def evict(self, size: int, protected: Container[Key] = (), also_protected: Container[Key] = ()) -> list[Key] | None:
        """Evict whole nodes until `size` is freed; their keys, children before parents. None, and nothing is evicted,
        if that cannot be without pinned and protected nodes (each candidate is looked up: give sets)."""
        going: list[TierNode] = []
        freed = 0
        if size > 0:
            for node in self._in_order(protected, also_protected):
                going.append(node)
                freed += node.size
                if freed >= size:
                    break
        if freed < size:
            return None
        for node in going:
            self._policy.evicted(node.priority)
            self._take_out(node)
        return [node.key for node in going]

    def victims(self) -> Iterator[Key]:
        """All nodes that are not pinned, nor above one that is, in the order in which they would go, and nothing
        changes: O(k log k) for the first k, to be taken before the tier changes again."""
        return (node.key for node in self._in_order())

    def clear(self) -> None:
        """The tier was emptied: nothing is held, pinned or remembered any more, the history is empty, too."""
        self._nodes.clear()
        self._parted.clear()
        self._candidates = NodeHeap()
        self.used = 0
        if self._history is not None:
            self._history.clear()

    def _count(self, node: TierNode, cost: float | None, computed: bool) -> None:
        self._uses += 1
        node.order = self._uses
        node.frequency += 1
        if cost is None:
            return
        node.misses += computed
        if node.misses == computed:
            # Nobody computed it before.
            node.cost = cost
        elif computed:
            node.cost += (cost - node.cost) / node.misses

    def _weigh(self, node: TierNode) -> None:
        node.priority = self._policy.priority(node)
        if node.place >= 0:
            self._candidates.update(node)

    def _change_candidates(self, before: TierNode | None, now: TierNode | None) -> None:
        """One is no candidate any more, if it was; another is from now on, if nothing keeps it."""
        if now is not None and (now.children or now.pins):
            now = None
        if before is None or before.place < 0:
            if now is not None:
                self._candidates.add(now)
        elif now is None:
            self._candidates.remove(before)
        else:
            self._candidates.replace(before, now)

    def _take_out(self, node: TierNode) -> None:
        del self._nodes[node.key]
        self.used -= node.size
        if node.children:
            self._parted[node.key] = node.children
        node.children = node.pins = 0
        holder = None
        if node.parent is not None:
            holder = self._nodes.get(node.parent)
            if holder is not None:
                holder.children -= 1
            elif self._parted[node.parent] > 1:
                self._parted[node.parent] -= 1
            else:
                del self._parted[node.parent]
        self._change_candidates(node, holder)
        if self._history is not None:
            self._history.keep(node)

    def _in_order(self, protected: Container[Key] = (), also_protected: Container[Key] = ()) -> Iterator[TierNode]:
        """Who would go, one after the other. Looks no further into the heap than it has come."""
        entries = self._candidates.entries
        frontier: list[tuple[Entry, int]] = [(entries[0], 0)] if entries else []
        children: dict[Key, int] = {}
        while frontier:
            (_, _, node), place = heappop(frontier)
            if place >= 0:
                for behind in (2 * place + 1, 2 * place + 2):
                    if behind < len(entries):
                        heappush(frontier, (entries[behind], behind))
            if node.key in protected or node.key in also_protected:
                continue
            yield node
            parent = self._nodes.get(node.parent)
            if parent is not None:
                left = children[parent.key] = children.get(parent.key, parent.children) - 1
                if not left and not parent.pins:
                    heappush(frontier, ((parent.priority, parent.order, parent), -1))
