"""Interface of a residency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from ragorder.trie.histories import TurnEnd
from ragorder.trie.tree import Node, RequestedDocuments, TokenIds

__all__ = ["Lease", "Loads", "Place", "Places", "RequestedDocuments", "Residency", "TokenIds"]


class Lease:
    """A request in flight since `stamp`.

    `cached_documents` and `cached_tokens` (system prompt included) of its `path` were held at its start. After the
    documents it fills `suffix_blocks` whole blocks, and `partial_blocks` (0 or 1) in part. `previous_stamp`: last
    use of the last held node (0: in use). `turn`: of a request in a conversation.
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
        "turn",
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
        self.turn: TurnEnd | None = None

    def copy(self, copies: Mapping[Node, Node]) -> Lease:
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
    """Marks the nodes that the engine holds, and removes evicted ones.

    The caller serialises all calls. Every lease ends with one `release` or `cancel`; a forgotten one counts as served
    when its room is needed.
    """

    def refresh(self, requested: RequestedDocuments | None = None) -> None:
        """Apply the engine's news, and find the requested documents in its cache. Called before each search."""

    def lease(self, path: Sequence[Node], suffix_tokens: int, token_ids: Sequence[TokenIds] = ()) -> Lease:
        """A request starts, with `suffix_tokens` (question and answer) after its documents. What it computes counts as
        held at once."""

    def release(
        self,
        lease: Lease,
        cached_tokens: float | None = None,
        total_tokens: float | None = None,
        prompt_tokens: float | None = None,
    ) -> None:
        """The request is served; the engine reported `cached_tokens` reused, `total_tokens` of prompt and answer,
        `prompt_tokens`."""

    def cancel(self, lease: Lease) -> None:
        """The request failed: what it alone would have computed is not held."""


class Place(IntEnum):
    """Fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Loads(NamedTuple):
    """Blocks that the engine loads from host memory and from disk before it reuses them."""

    host: int = 0
    disk: int = 0


@runtime_checkable
class Places(Protocol):
    """A residency in an engine with several tiers: where blocks of nodes are."""

    def loads(self, node: Node) -> Loads:
        """Of the node's held blocks."""

    def serve(self, path: Sequence[Node], lease: Lease, expected_uses: Callable[[], Sequence[float]]) -> None:
        """The request of a new lease brings its path to the device. Without room the lease has ended already.
        `expected_uses`: forecast uses of its documents' nodes, or none."""
