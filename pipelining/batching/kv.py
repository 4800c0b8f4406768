"""KV tokens of a batch, counted on a trie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol

from ragorder.pipelining.protocols import D, Q
from ragorder.trie.plan import plan
from ragorder.trie.search import BestPathSearch, ranks_on_path
from ragorder.trie.tree import Key, KnowledgeTree, Node

# With fewer requests all are planned again: that takes a millisecond and shares most.
_PLANNED = 8
# All are planned again after this share of them has changed: a trie that is only extended grows by some 5 %.
_CHANGED = 0.25
_BUDGET = 256


class _RunningTrie:
    """Each request's documents as a path, with the `tokens` of all nodes."""

    def __init__(self) -> None:
        self.tokens = 0
        self._search = BestPathSearch(_BUDGET)
        self._begin()

    def hold(self, requests: Mapping[Hashable, Mapping[Key, int]]) -> None:
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
                # The engine has all of it.
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


class Context(NamedTuple, Generic[Q, D]):
    """A question and its documents in rank order."""

    question: Q
    documents: Sequence[D]


class KVTokens(Protocol[Q, D]):
    def __call__(self, contexts: Sequence[Context[Q, D]], /) -> int:
        """Return the KV tokens that the engine keeps while these requests run together."""


class TrieKV(Generic[Q, D]):
    """KV tokens of a batch: a prefix that requests share counts once.

        TrieKV(key=lambda document: document.key, tokens=builder.document_tokens, own_tokens=lambda question: 300)

    - `key`, `tokens`: of a document; equal keys have equal KV after equal documents
    - `own_tokens`: question and answer of a request; `prefix_tokens`: the system prompt
    - `scope`: requests of different scopes share nothing
    """

    def __init__(
        self,
        *,
        key: Callable[[D], Hashable],
        tokens: Callable[[D], int],
        own_tokens: Callable[[Q], int],
        prefix_tokens: int = 0,
        scope: Callable[[Q], Hashable] = lambda question: None,
    ) -> None:
        self._key = key
        self._tokens = tokens
        self._own_tokens = own_tokens
        self._prefix_tokens = prefix_tokens
        self._scope = scope
        self._held: dict[Hashable, _Held] = {}
        self._tries: dict[Hashable, _RunningTrie] = {}

    def __call__(self, contexts: Sequence[Context[Q, D]], /) -> int:
        held: dict[Hashable, _Held] = {}
        for context in contexts:
            # The ids stay unique because the objects are kept.
            question, documents, number = id(context.question), id(context.documents), 0
            while (question, documents, number) in held:
                number += 1
            request = (question, documents, number)
            held[request] = self._held.get(request) or self._read(context)
        self._held = held
        scopes: dict[Hashable, dict[Hashable, Mapping[Hashable, int]]] = {}
        for name, of in held.items():
            scopes.setdefault(of.scope, {})[name] = of.documents
        self._tries = {scope: self._tries.get(scope) or _RunningTrie() for scope in scopes}
        for scope, requests in scopes.items():
            self._tries[scope].hold(requests)
        own = sum(of.own_tokens for of in held.values())
        return own + sum(self._prefix_tokens + trie.tokens for trie in self._tries.values())

    def _read(self, context: Context[Q, D]) -> _Held:
        seen: dict[Hashable, int] = {}
        documents: dict[Hashable, int] = {}
        for document in context.documents:
            key = self._key(document)
            # A document that occurs twice in a prompt has KV twice.
            number = seen[key] = seen.get(key, -1) + 1
            documents[key, number] = self._tokens(document)
        return _Held(context, self._scope(context.question), self._own_tokens(context.question), documents)


class _Held(NamedTuple):
    context: Context[Any, Any]
    scope: Hashable
    own_tokens: int
    documents: Mapping[Hashable, int]


def largest_prefix(count: int, fits: Callable[[int], bool]) -> int:
    low, high = 1, count
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
