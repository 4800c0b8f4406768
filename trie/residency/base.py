"""What a residency must tell: which part of the knowledge tree the engine still holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ragorder.trie.tree import Key, Node

__all__ = ["Lease", "Residency", "Sought", "TokenIds"]

TokenIds = Sequence[int]


class Sought(Protocol):
    """The documents of a request that the tree is about to be searched for, in rank order; `token_ids` are empty where
    they are not known."""

    @property
    def keys(self) -> Sequence[Key]: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def token_ids(self) -> Sequence[TokenIds]: ...


class Lease:
    """A request in flight since `stamp`.

    `path` are its nodes; of them `cached_documents` documents and `cached_tokens` tokens, system prompt included, were
    held when it started. Behind the documents it fills `suffix_blocks` whole blocks, and one more in part if
    `partial_blocks` is 1. `previous_stamp` says when the last node that was held had been used (0: it is in use).
    """

    __slots__ = (
        "cached_documents",
        "cached_tokens",
        "open",
        "partial_blocks",
        "path",
        "previous_stamp",
        "stamp",
        "suffix_blocks",
    )

    def __init__(
        self,
        path: Sequence[Node],
        stamp: int,
        suffix_blocks: int,
        partial_blocks: int,
        cached_documents: int,
        cached_tokens: int,
        previous_stamp: int,
    ) -> None:
        self.path = path
        self.stamp = stamp
        self.suffix_blocks = suffix_blocks
        self.partial_blocks = partial_blocks
        self.cached_documents = cached_documents
        self.cached_tokens = cached_tokens
        self.previous_stamp = previous_stamp
        self.open = True

    def copy(self, copies: Mapping[Node, Node]) -> Lease:
        """The same lease on the copies of its nodes."""
        return Lease(
            [copies[node] for node in self.path],
            self.stamp,
            self.suffix_blocks,
            self.partial_blocks,
            self.cached_documents,
            self.cached_tokens,
            self.previous_stamp,
        )


class Residency(Protocol):
    """Marks on the tree's nodes what the engine holds, and takes out of the tree what it no longer does.

    The caller serialises all calls. Every lease ends with `release` or `cancel`; one that is forgotten counts as
    served once newer requests need its room. Ending a lease a second time does nothing.
    """

    def refresh(self, sought: Sought | None = None) -> None:
        """Take in what was learnt of the engine since the last call, and where it holds the documents that are sought.
        Called before the tree is searched."""

    def lease(self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = ()) -> Lease:
        """A request with these documents starts, `suffix_tokens` (question and answer) follow them. What it computes
        counts as held at once; `Lease.cached_tokens` and `cached_documents` say how much of it was held before.
        `token_ids` are those of each document of the path, if they are known."""

    def release(
        self,
        lease: Lease,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        prompt_tokens: float | None = None,
    ) -> None:
        """The request is served. `cached_tokens` is what the engine says it reused, `total_tokens` the length of prompt
        and answer, and `prompt_tokens` that of the prompt, if it says."""

    def cancel(self, lease: Lease) -> None:
        """The request failed: what only it would have computed is not held."""
