"""Leases of requests in flight, and places of blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from ragorder.trie.histories import TurnEnd
from ragorder.trie.tree import Node

Reported = float | None
"""Tokens that an engine reported, if it did."""


@dataclass(slots=True, eq=False)
class Lease:
    """A request in flight since `stamp`.

    At its start the engine held `cached_documents` and `cached_tokens` (with the system prompt) of its `path`. After
    the documents it fills `suffix_blocks`, and `partial_blocks` (0 or 1) in part. `previous_stamp`: last use of the
    last cached node (0: in use). A lease ends with one `release` or `cancel`; a lost one counts as served when its room
    is needed.
    """

    path: Sequence[Node]
    stamp: int
    suffix_blocks: int
    partial_blocks: int
    cached_documents: int
    cached_tokens: int
    previous_stamp: int
    open: bool = True
    turn: TurnEnd | None = None

    def copy(self, copies: Mapping[Node, Node]) -> Lease:
        return replace(self, path=[copies[node] for node in self.path], open=True, turn=None)


class TierLevel(IntEnum):
    """Tiers of an engine, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Loads(NamedTuple):
    """Blocks to load from host memory and from disk."""

    host: int = 0
    disk: int = 0


@runtime_checkable
class KnowsTiers(Protocol):
    """A residency that knows the tier of each block."""

    def loads(self, node: Node) -> Loads: ...
    def serve(self, path: Sequence[Node], lease: Lease, expected_uses: Callable[[], Sequence[float]]) -> None:
        """Put a new request's path on the device; without room, the lease has ended already."""
