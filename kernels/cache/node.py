"""A node of the knowledge tree, and where its KV is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.kernels.policies import TierNode

if TYPE_CHECKING:
    from ragorder.kernels.cache.copies import Copy
    from ragorder.kernels.cache.loading import Load

__all__ = ["CachedNode", "DeviceCopy", "HostCopy"]


class CachedNode:
    """`tokens` tokens that begin at position `start` of every prompt they are in. On the disk there may be another
    copy, which is found by the key."""

    __slots__ = ("device", "host", "key", "parent", "start", "tokens")

    def __init__(self, key: bytes, parent: bytes | None, start: int, tokens: int) -> None:
        self.key = key
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.device: DeviceCopy | None = None
        self.host: HostCopy | None = None

    @property
    def end(self) -> int:
        return self.start + self.tokens


class DeviceCopy:
    """A node's KV in the device's pool: `blocks` cover it, from the one in which it starts to the one in which it ends.

    Blocks at both ends have room for others' tokens. `shares`: the first block is the parent's last one, too, and
    counts as the parent's. `certain` is False until the step that computes the node is known to have begun in full;
    `load` is the way it takes if it is not here yet. `origin` is the tier that it came from, and `ahead` whether it
    came for a request that waits, until one that found it here begins. `entry` is what the tier's policy knows of it.
    """

    __slots__ = ("ahead", "blocks", "certain", "entry", "load", "node", "origin", "shares")

    def __init__(self, node: CachedNode, blocks: list[int], *, shares: bool, certain: bool) -> None:
        self.node = node
        self.blocks = blocks
        self.shares = shares
        self.certain = certain
        self.load: Load | None = None
        self.origin = "device"
        self.ahead = False
        self.entry: TierNode | None = None

    @property
    def size(self) -> int:
        """The blocks that the device would not need without it."""
        return len(self.blocks) - self.shares

    @property
    def here(self) -> bool:
        """Whether this is (still) the node's copy on the device."""
        return self.node.device is self

    @property
    def complete(self) -> bool:
        """Whether the KV is in the blocks, or will be before anything that is computed from now on."""
        return self.certain and self.load is None


class HostCopy:
    """A node's KV in the host's pool, in blocks of its own. `arrival` is the copy that brings it, until that ended."""

    __slots__ = ("arrival", "blocks", "entry")

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.arrival: Copy | None = None
        self.entry: TierNode | None = None

    @property
    def complete(self) -> bool:
        """Whether the KV is in the blocks."""
        return self.arrival is None
