"""Documents of the requests that run, as a trie that others join and leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise

from ragorder.trie.plan import plan
from ragorder.trie.search import BestPathSearch, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node

__all__ = ["RunningTrie"]

# Of fewer requests all are planned again: that takes a millisecond, and finds what they share best.
_PLANNED = 8
# All are planned again once so large a share of them has come or gone: a trie that is only extended grows by some 5 %.
_CHANGED = 0.25
_BUDGET = 256


class RunningTrie:
    """Each request's documents as a path; `tokens` of all nodes.

    A request that joins alone extends the path that shares most tokens with it, and places its other documents by how
    many of the running ones have them. Several are planned together with all that run (`trie.plan`), and so are all
    from time to time.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._search = BestPathSearch(_BUDGET)
        self._begin()

    def hold(self, requests: Mapping[Hashable, Mapping[Key, int]]) -> None:
        """These requests run, and no others: of each the tokens of its documents, in rank order."""
        new = [request for request in requests if request not in self._ends]
        gone = [request for request in self._ends if request not in requests]
        self._changes += len(new) + len(gone)
        few, old = len(requests) <= _PLANNED, self._changes >= _CHANGED * len(requests)
        if new and (len(new) > 1 or few or old):
            self._plan(requests)
            return
        for request in gone:
            self._remove(request)
        for request in new:
            self._join(request, requests[request])

    def _begin(self) -> None:
        self.tokens = self._changes = 0
        self._tree = KnowledgeTree(block_size=1)
        # The last node of each request.
        self._ends: dict[Hashable, Node] = {}
        self._holders: Counter[Key] = Counter()

    def _plan(self, requests: Mapping[Hashable, Mapping[Key, int]]) -> None:
        self._begin()
        tokens = {key: count for documents in requests.values() for key, count in documents.items()}
        names = list(requests)
        for index, order in plan([list(documents) for documents in requests.values()], tokens):
            self._insert(names[index], order, tokens)

    def _join(self, request: Hashable, documents: Mapping[Key, int]) -> None:
        ranks = {key: rank for rank, key in enumerate(documents)}
        keys = list(documents)
        path = [keys[rank] for rank in ranks_on_path(self._search.find(self._tree, ranks), ranks)]
        shared = set(path)
        rest = [key for key in keys if key not in shared]
        rest.sort(key=lambda key: -self._holders[key])
        self._insert(request, [*path, *rest], documents)

    def _insert(self, request: Hashable, order: Sequence[Key], tokens: Mapping[Key, int]) -> None:
        path = self._tree.insert(order, [tokens[key] for key in order], range(len(order)))
        for parent, node in pairwise(path):
            if not node.leases:
                self.tokens += node.end - parent.end
                # All of it is held.
                node.missing = 0
            node.leases += 1
        self._ends[request] = path[-1]
        self._holders.update(order)

    def _remove(self, request: Hashable) -> None:
        node = self._ends.pop(request)
        while node.parent is not None:
            parent = node.parent
            self._holders[node.key] -= 1
            if not self._holders[node.key]:
                del self._holders[node.key]
            node.leases -= 1
            if not node.leases:
                self.tokens -= node.end - parent.end
                self._tree.remove(node)
            node = parent
