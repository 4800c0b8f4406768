"""KV of a batch: its trie, not its sum."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from ragorder.trie.plan import plan

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
    """Tokens of a batch laid on the trie of `trie.plan`: what its requests share at the beginning counts once.

        TrieKV(key=lambda document: document.key, tokens=builder.document_tokens, own_tokens=lambda question: 300)

    - `key`, `tokens`: of a document; equal keys have equal KV behind equal documents
    - `own_tokens`: of a request alone: question and answer; `prefix_tokens`: of the system prompt
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

    def __call__(self, contexts: Sequence[Context[Q, D]], /) -> int:
        scopes: dict[Hashable, list[Context[Q, D]]] = {}
        for context in contexts:
            scopes.setdefault(self._scope(context.question), []).append(context)
        own = sum(self._own_tokens(context.question) for context in contexts)
        return own + sum(self._prefix_tokens + self._trie_tokens(group) for group in scopes.values())

    def _trie_tokens(self, contexts: Sequence[Context[Q, D]]) -> int:
        tokens: dict[Hashable, int] = {}
        requests = [list(self._keys(context.documents, tokens)) for context in contexts]
        # A trie served depth first: what a request shares with the one before it is held already.
        total, before = 0, list[Hashable]()
        for _, order in plan(requests, tokens):
            shared = next(
                (place for place, (one, other) in enumerate(zip(order, before, strict=False)) if one != other),
                min(len(order), len(before)),
            )
            total += sum(tokens[key] for key in order[shared:])
            before = order
        return total

    def _keys(self, documents: Sequence[D], tokens: dict[Hashable, int]) -> Iterator[Hashable]:
        seen: dict[Hashable, int] = {}
        for document in documents:
            key = self._key(document)
            # A document that occurs twice in a prompt has KV twice.
            number = seen[key] = seen.get(key, -1) + 1
            numbered = (key, number)
            if numbered not in tokens:
                tokens[numbered] = self._tokens(document)
            yield numbered


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
