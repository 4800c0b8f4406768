"""KV of a batch: its trie, not its sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ragorder.pipelining.batching.running_trie import RunningTrie

__all__ = ["Context", "KVTokens", "TrieKV", "largest_prefix"]

Q = TypeVar("Q")
D = TypeVar("D")


class Context(NamedTuple, Generic[Q, D]):
    """A question and its documents, in rank order."""

    question: Q
    documents: Sequence[D]


class KVTokens(Protocol[Q, D]):
    def __call__(self, contexts: Sequence[Context[Q, D]], /) -> int:
        """Tokens whose KV the engine holds while these requests run together."""


class TrieKV(Generic[Q, D]):
    """Tokens of a batch laid on a trie: what its requests share at the beginning counts once.

        TrieKV(key=lambda document: document.key, tokens=builder.document_tokens, own_tokens=lambda question: 300)

    - `key`, `tokens`: of a document; equal keys have equal KV behind equal documents
    - `own_tokens`: of a request alone: question and answer; `prefix_tokens`: of the system prompt
    - `scope`: requests of different scopes share nothing

    A batch is planned (`trie.plan`); the trie is kept, and a request that joins it alone is laid on it as it stands.
    Requests are told apart by the objects of their question and documents, which are read once while they run.
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
        self._tries: dict[Hashable, RunningTrie] = {}

    def __call__(self, contexts: Sequence[Context[Q, D]], /) -> int:
        held: dict[Hashable, _Held] = {}
        for context in contexts:
            # Objects that are held have their ids for themselves.
            question, documents, number = id(context.question), id(context.documents), 0
            while (question, documents, number) in held:
                number += 1
            request = (question, documents, number)
            held[request] = self._held.get(request) or self._read(context)
        self._held = held
        scopes: dict[Hashable, dict[Hashable, Mapping[Hashable, int]]] = {}
        for name, of in held.items():
            scopes.setdefault(of.scope, {})[name] = of.documents
        self._tries = {scope: self._tries.get(scope) or RunningTrie() for scope in scopes}
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
    """The most of `count` items, taken from the front, that fit; at least one. More items are taken to need no less
    room, and what is returned has been found to fit, unless it is one."""
    low, high = 1, count
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
