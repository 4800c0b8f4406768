"""Order of a batch's requests and of their documents.

Served depth first along a trie, a batch prefills every node once. So the best plan is the cheapest trie in which each
request's set of documents is a path.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain, islice, pairwise
from math import log
from operator import itemgetter
from typing import Any, NamedTuple

from ragorder.trie.tree import Key

_Documents = frozenset[int]
Planned = tuple[int, list[Key]]

_SCARCITY = 0.05
"""Price of a document that a merge leaves unshared: this share of its tokens per e-fold of its popularity."""

_MOST_HOLDERS = 512
"""Documents of more requests become branches, which bounds the lists of candidates."""

_MOST_CANDIDATES = 1024
"""Candidates examined as partners of one cluster."""


def plan(requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int]) -> list[Planned]:
    """Return (request's index, its documents in order) in serving order.

    Requests that share documents are adjacent and start with them: an LRU cache of little more than one prompt
    suffices. Never worse than the given orders; near-linear.
    """
    number: dict[Key, int] = {}
    given = [[number.setdefault(key, len(number)) for key in request] for request in requests]
    keys, weights = list(number), [tokens[key] for key in number]
    as_given = sorted(enumerate(given), key=itemgetter(1))
    planned = max(_planned(given, weights), as_given, key=lambda orders: _saved_tokens(orders, weights))
    return [(index, [keys[document] for document in order]) for index, order in planned]


def _planned(given: list[list[int]], tokens: list[int]) -> list[tuple[int, list[int]]]:
    askers: dict[_Documents, list[int]] = {}
    for index, order in enumerate(given):
        askers.setdefault(frozenset(order), []).append(index)
    trie, indices = _Trie(list(askers), tokens), list(askers.values())
    _build(trie)
    trie.improve()
    paths = trie.paths([given[first] for first, *_ in indices])
    return [(index, path) for leaf, path in paths for index in indices[leaf]]


def _saved_tokens(orders: Iterable[tuple[int, Sequence[Any]]], tokens: Any) -> int:
    return sum(shared_tokens(before, order, tokens) for (_, before), (_, order) in pairwise(orders))


class _Trie:
    """A trie over sets of documents; leaves are the distinct requests.

    A node holds *all* documents of its path. At most one child continues with a given document (`branch`).
    """

    def __init__(self, leaves: Sequence[_Documents], tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self.leaves = self.root = len(leaves)
        self.documents: list[_Documents] = []
        self.weight: list[int] = []
        self.parent: list[int] = []
        self.children: list[dict[int, None]] = []
        self.branch: list[dict[int, int]] = []
        for documents in (*leaves, frozenset[int]()):
            self.add(documents)

    def weigh(self, documents: Iterable[int]) -> int:
        return sum(map(self.tokens.__getitem__, documents))

    def add(self, documents: _Documents) -> int:
        self.documents.append(documents)
        self.weight.append(self.weigh(documents))
        self.parent.append(-1)
        self.children.append({})
        self.branch.append({})
        return len(self.documents) - 1

    def attach(self, node: int, parent: int) -> None:
        self.parent[node] = parent
        self.children[parent][node] = None
        branch = self.branch[parent]
        for document in self.documents[node] - self.documents[parent]:
            branch.setdefault(document, node)

    def detach(self, node: int) -> int:
        parent = self.parent[node]
        self.parent[node] = -1
        del self.children[parent][node]
        branch = self.branch[parent]
        for document in self.documents[node] - self.documents[parent]:
            if branch.get(document) == node:
                del branch[document]
        return parent

    def dissolve(self, node: int) -> int:
        (child,) = self.children[node]
        self.detach(child)
        self.attach(child, self.detach(node))
        return child

    def best_place(self, node: int) -> tuple[int, int]:
        wanted = self.documents[node]
        most, place = 0, self.root
        stack = [self.root]
        while stack:
            branch = self.branch[stack.pop()]
            few, many = (wanted, branch) if len(wanted) < len(branch) else (branch, wanted)
            for child in dict.fromkeys([branch[document] for document in few if document in many]):
                if child == node:
                    continue
                documents = self.documents[child]
                if documents <= wanted:
                    shared = self.weight[child]
                    if child > self.root:
                        stack.append(child)
                else:
                    shared = self.weigh(documents & wanted)
                if shared > most:
                    most, place = shared, child
        return most, place

    def graft(self, node: int, place: int) -> None:
        shared = self.documents[node] & self.documents[place]
        if place < self.root or len(shared) < len(self.documents[place]):
            fork = self.add(shared)
            self.attach(fork, self.detach(place))
            self.attach(place, fork)
            place = fork
        self.attach(node, place)

    def improve(self) -> None:
        """Move every subtree, leaves first, to where it shares most tokens."""
        waiting = deque(range(len(self.documents)))
        while waiting:
            node = waiting.popleft()
            if self.parent[node] < 0:
                continue
            shared, place = self.best_place(node)
            if shared <= self.weight[self.parent[node]]:
                continue
            parent = self.detach(node)
            if parent != self.root and len(self.children[parent]) == 1:
                remaining = self.dissolve(parent)
                waiting.appendleft(remaining)
                if place == parent:
                    place = remaining
            self.graft(node, place)

    def paths(self, preferred: Sequence[Sequence[int]]) -> Iterable[tuple[int, list[int]]]:
        stack: list[tuple[int, list[int]]] = [(self.root, [])]
        while stack:
            node, path = stack.pop()
            if node < self.leaves:
                shared = self.documents[self.parent[node]]
                yield node, path + [document for document in preferred[node] if document not in shared]
                continue
            path = path + sorted(self.documents[node].difference(path))
            stack += [(child, path) for child in reversed(self.children[node])]


def _build(trie: _Trie) -> None:
    """Branch on frequent documents top-down, then merge the rest bottom-up."""
    groups = [(trie.root, list(range(trie.leaves)))]
    while groups:
        base, members = groups.pop()
        common = trie.documents[base]
        popularity = Counter(chain.from_iterable([trie.documents[member] for member in members]))
        hot = {
            document: count
            for document, count in popularity.items()
            if count > _MOST_HOLDERS and document not in common
        }
        holders: dict[int, list[int]] = {document: [] for document in hot}
        for member in members if hot else ():
            for document in trie.documents[member]:
                if document in hot:
                    holders[document].append(member)
        left = dict.fromkeys(members)
        while hot:
            document = max(hot, key=lambda document: ((hot[document] - 1) * trie.tokens[document], -document))
            group = [member for member in holders[document] if member in left]
            for member in group:
                del left[member]
                for other in trie.documents[member]:
                    if other in hot:
                        hot[other] -= 1
            hot = {document: count for document, count in hot.items() if count > _MOST_HOLDERS}
            node = trie.add(common | {document})
            trie.attach(node, base)
            groups.append((node, group))
        _Clusters(trie, base, list(left)).merge()
        if len(trie.children[base]) == 1 and base != trie.root:
            trie.dissolve(base)


class _Clusters:
    """The members of `base`, merged pairwise by the documents that they share beyond it."""

    def __init__(self, trie: _Trie, base: int, members: list[int]) -> None:
        self.trie, self.base, self.members = trie, base, members
        self.documents: list[_Documents] = []
        self.price: list[float] = []
        self.parts: dict[int, tuple[int, int]] = {}
        self.alive: dict[int, None] = {}
        common = trie.documents[base]
        remaining = [trie.documents[member] - common for member in members]
        counts = Counter(chain.from_iterable(remaining))
        self.popularity = {document: count for document, count in counts.items() if count > 1}
        self.holders: dict[int, dict[int, None]] = {document: {} for document in self.popularity}
        self.price_of = {
            document: _SCARCITY * trie.tokens[document] * log(count) for document, count in self.popularity.items()
        }
        self.worth_of = {document: trie.tokens[document] + 2 * price for document, price in self.price_of.items()}
        for documents in remaining:
            self.add(frozenset(documents & self.popularity.keys()))

    def add(self, documents: _Documents) -> int:
        cluster = len(self.documents)
        self.documents.append(documents)
        self.price.append(sum([self.price_of[document] for document in documents]))
        self.alive[cluster] = None
        for document in documents:
            self.holders[document][cluster] = None
        return cluster

    def remove(self, cluster: int) -> None:
        del self.alive[cluster]
        for document in self.documents[cluster]:
            del self.holders[document][cluster]

    def best_pair(self, cluster: int) -> list[tuple[float, int, int]]:
        worth: dict[int, float] = {}
        documents = sorted(self.documents[cluster], key=self.popularity.__getitem__)
        budget = max(_MOST_CANDIDATES, 16 * len(documents))
        for document in documents:
            held, added = self.holders[document], self.worth_of[document]
            if len(held) < 2:
                continue
            if worth:
                known = worth.get
                for other in held:
                    worth[other] = known(other, 0.0) + added
            else:
                worth = dict.fromkeys(held, added)
            budget -= len(held)
            if budget < 0:
                break
        worth.pop(cluster, None)
        if not worth:
            return []
        price = self.price
        net = [gained - price[other] for other, gained in worth.items()]
        best = max(net)
        partner = next(islice(worth, net.index(best), None))
        return [(price[cluster] - best, cluster, partner)]

    def merge(self) -> None:
        pairs = [pair for cluster in self.alive for pair in self.best_pair(cluster)]
        heapify(pairs)
        while pairs:
            _, cluster, partner = heappop(pairs)
            if cluster not in self.alive:
                continue
            if partner in self.alive:
                self.remove(cluster)
                self.remove(partner)
                parts = cluster, partner
                cluster = self.add(self.documents[cluster] & self.documents[partner])
                self.parts[cluster] = parts
            for pair in self.best_pair(cluster):
                heappush(pairs, pair)
        self.attach()

    def attach(self) -> None:
        trie, common = self.trie, self.trie.documents[self.base]
        stack = [(cluster, self.base) for cluster in reversed(self.alive)]
        while stack:
            cluster, parent = stack.pop()
            if cluster < len(self.members):
                trie.attach(self.members[cluster], parent)
                continue
            documents = common | self.documents[cluster]
            if len(documents) > len(trie.documents[parent]):
                node = trie.add(documents)
                trie.attach(node, parent)
                parent = node
            stack += [(part, parent) for part in reversed(self.parts[cluster])]


class CachedPath(NamedTuple):
    """A request's best cached path, last used at `stamp`."""

    keys: tuple[Key, ...]
    tokens: int
    stamp: int


def plan_backlog(
    requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int], cached: Sequence[CachedPath]
) -> list[Planned]:
    """Plan for a cache that holds a path for each request; those that gain more from it come first."""
    planned = plan(requests, tokens)
    places: dict[CachedPath, list[int]] = {}
    for place, (index, _) in enumerate(planned):
        if cached[index].tokens:
            places.setdefault(cached[index], []).append(place)
    scratch = _Scratch([order for _, order in planned], tokens)
    on_path: list[Planned] = []
    moved: set[int] = set()
    for path in sorted(places, key=lambda path: path.stamp):
        # Requests of one path share the same documents on it as in the plan: they move together, or alone.
        for group in (places[path], [place for place in places[path] if path.tokens > scratch.cost([place])]):
            extended = _extend(path, [planned[place][0] for place in group], requests, tokens)
            if path.tokens + _saved_tokens(extended, tokens) > scratch.cost(group):
                on_path += extended
                moved.update(group)
                break
    return on_path + [each for place, each in enumerate(planned) if place not in moved]


class _Scratch:
    def __init__(self, orders: Sequence[Sequence[Key]], tokens: Mapping[Key, int]) -> None:
        self._orders = [[], *orders, []]
        self._tokens = tokens

    def cost(self, places: Sequence[int]) -> int:
        cost = 0
        for first, last in _runs(places):
            cost += sum(self._shared(place, place + 1) for place in range(first - 1, last + 1))
            cost -= self._shared(first - 1, last + 1)
        return cost

    def _shared(self, place: int, other: int) -> int:
        return shared_tokens(self._orders[place + 1], self._orders[other + 1], self._tokens)


def _runs(places: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = None
    for place in places:
        if first is None or last is None:
            first = place
        elif place != last + 1:
            yield first, last
            first = place
        last = place
    if first is not None and last is not None:
        yield first, last


def _extend(
    path: CachedPath, indices: Sequence[int], requests: Sequence[Sequence[Key]], tokens: Mapping[Key, int]
) -> list[Planned]:
    held = list(path.keys)
    placed = set(held)
    beyond = plan([[key for key in requests[index] if key not in placed] for index in indices], tokens)
    return [(indices[number], held + order) for number, order in beyond]


def shared_documents(one: Sequence[Key], other: Sequence[Key]) -> int:
    shared = 0
    for key, opposite in zip(one, other, strict=False):
        if key != opposite:
            break
        shared += 1
    return shared


def shared_tokens(one: Sequence[Key], other: Sequence[Key], tokens: Mapping[Key, int]) -> int:
    return sum([tokens[key] for key in one[: shared_documents(one, other)]])
