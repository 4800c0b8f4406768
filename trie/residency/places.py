"""Places of held blocks: device, host memory and disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

from ragorder.trie.residency.base import Lease
from ragorder.trie.tree import Node

__all__ = ["Loads", "Place", "Places"]


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
