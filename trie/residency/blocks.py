"""Blocks of an engine's KV cache, tracked by its events."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple, Protocol

from ragorder.trie.residency.base import TierLevel

__all__ = ["BlockWatcher", "Content", "EngineBlocks", "PathContents", "block_content", "chain_root", "pack_tokens"]

Content = bytes
"""Digest of a block's tokens and all tokens before them, independent of the engine's block hash."""

_TOKEN_BYTES = array("q").itemsize


class BlockWatcher(Protocol):
    """Receives in `changed` the watched contents that were stored or removed."""

    changed: dict[Content, None]


def chain_root(salt: str | None = None) -> Content:
    """Return the content before a prompt's first block; `salt` is the tenant's `cache_salt`."""
    return _keyed((salt,)) if salt else b""


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Raise TypeError unless all are token ids, OverflowError beyond 63 bits."""
    return array("q", token_ids).tobytes()


def block_content(parent: Content, token_ids: Sequence[int]) -> Content:
    """Return the content of a block after `parent`; raise as `pack_tokens` does."""
    return _digest(parent, pack_tokens(token_ids))


def _digest(parent: Content, tokens: bytes) -> Content:
    return blake2b(parent + tokens, digest_size=16).digest()


def _keyed(extra_keys: Iterable[Any] | None) -> Content:
    return repr(tuple(extra_keys)).encode("utf-8", "backslashreplace") if extra_keys else b""


@dataclass(slots=True, eq=False)
class PathContents:
    """A path's last part: its `blocks`, the `last` complete block, and packed tokens after it (`rest`)."""

    last: Content = b""
    blocks: tuple[Content, ...] = ()
    rest: bytes = b""

    def first_block(self, tokens: bytes, block_size: int) -> Content | None:
        missing = block_size * _TOKEN_BYTES - len(self.rest)
        return _digest(self.last, self.rest + tokens[:missing]) if len(tokens) >= missing else None

    def extend(self, tokens: bytes, block_size: int) -> PathContents:
        tokens = self.rest + tokens
        content, size = self.last, block_size * _TOKEN_BYTES
        blocks = []
        for start in range(0, len(tokens) - size + 1, size):
            content = _digest(content, tokens[start : start + size])
            blocks.append(content)
        return PathContents(content, tuple(blocks), tokens[len(blocks) * size :])


class _Held(NamedTuple):
    hash: Hashable
    media: tuple[Hashable, ...]


class EngineBlocks:
    """The blocks of one engine's cache. One thread writes, any thread reads.

        blocks = EngineBlocks(block_size=16)
        blocks.store(["hash"], None, range(16))

    `generation` changes if blocks may have been evicted without events, `epoch` with the engine. `max_blocks` should be
    a multiple of the engine's capacity. `orphans` counts blocks with unknown parents.
    """

    def __init__(self, block_size: int, max_blocks: int = 1 << 18) -> None:
        self.block_size = block_size
        self.max_blocks = max_blocks
        self.generation = 0
        self.epoch = 0
        self.orphans = 0
        self._lock = Lock()
        # A hash always identifies the same content, so it is kept after the block is evicted.
        # OrderedDict: a dict scans all deleted entries to find the oldest.
        self._contents: OrderedDict[Hashable, Content] = OrderedDict()
        self._held: dict[Content, _Held] = {}
        self._watchers: dict[Content, BlockWatcher] = {}

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, content: Content) -> bool:
        return content in self._held

    def place(self, content: Content) -> TierLevel:
        held = self._held.get(content)
        media = held.media if held is not None else ()
        return min((medium for medium in media if isinstance(medium, TierLevel)), default=TierLevel.DEVICE)

    def watch(self, content: Content, watcher: BlockWatcher) -> None:
        self._watchers[content] = watcher

    def unwatch(self, content: Content, watcher: BlockWatcher) -> None:
        if self._watchers.get(content) is watcher:
            del self._watchers[content]

    def store(
        self,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        token_ids: Sequence[int],
        extra_keys: Sequence[Sequence[Any] | None] | None = None,
        medium: Hashable = None,
    ) -> None:
        """Record consecutive blocks after `parent` (None: the start of a prompt).

        `extra_keys` are each block's hash inputs besides tokens. A block is held while any `medium` (tier) holds it.
        Raises ValueError if the tokens do not fill the blocks.
        """
        size = self.block_size
        if len(token_ids) != size * len(hashes) or (extra_keys and len(extra_keys) != len(hashes)):
            raise ValueError(f"{len(hashes)} blocks of {size} tokens cannot have {len(token_ids)} tokens")
        with self._lock:
            above = content = b""
            if parent is not None:
                if parent not in self._contents:
                    self.orphans += len(hashes)
                    return
                above = content = self._contents[parent]
            # An invalid event must not be applied in part.
            stored: dict[Hashable, Content] = {}
            for number, block_hash in enumerate(hashes):
                keys = _keyed(extra_keys[number]) if extra_keys else b""
                content = block_content(content + keys, token_ids[number * size : (number + 1) * size])
                stored[block_hash] = content
            if above:
                # A block with children is held: only a duplicate of it was removed.
                self._hold(above, parent, medium)
            for block_hash, content in stored.items():
                known = self._contents.pop(block_hash, content)
                if known != content:
                    self._drop(known)
                self._contents[block_hash] = content
                self._hold(content, block_hash, medium)
            self._drop_oldest()

    def keep(self, hashes: Sequence[Hashable], medium: Hashable) -> int:
        with self._lock:
            known = [block_hash for block_hash in hashes if block_hash in self._contents]
            for block_hash in known:
                self._contents.move_to_end(block_hash)
                self._hold(self._contents[block_hash], block_hash, medium)
        return len(hashes) - len(known)

    def remove(self, hashes: Iterable[Hashable], medium: Hashable = None) -> None:
        with self._lock:
            for block_hash in hashes:
                content = self._contents.get(block_hash)
                held = self._held.get(content) if content is not None else None
                if content is not None and held is not None and medium in held.media:
                    left = tuple(each for each in held.media if each != medium)
                    if left:
                        self._held[content] = held._replace(media=left)
                    else:
                        self._drop(content)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self.generation += 1

    def replace(self, other: EngineBlocks, *, same_engine: bool) -> None:
        """Take the state of `other`, not to be used afterwards."""
        with self._lock:
            self._contents, self._held = other._contents, other._held
            self.orphans += other.orphans
            self.generation += 1
            self.epoch += not same_engine

    def make_successor(self, *, same_engine: bool) -> EngineBlocks:
        successor = EngineBlocks(self.block_size, self.max_blocks)
        if same_engine:
            with self._lock:
                successor._contents.update(self._contents)
        return successor

    def _drop_oldest(self) -> None:
        while len(self._contents) > self.max_blocks:
            oldest, content = self._contents.popitem(last=False)
            held = self._held.get(content)
            if held is None or held.hash in self._contents:
                continue
            if 2 * len(self._held) <= self.max_blocks:
                self._contents[oldest] = content
            else:
                self._drop(content)

    def _hold(self, content: Content, block_hash: Hashable, medium: Hashable) -> None:
        held = self._held.get(content)
        media = held.media if held is not None else ()
        self._held[content] = _Held(block_hash, media if medium in media else (*media, medium))
        if held is None:
            self._notify(content)

    def _drop(self, content: Content) -> None:
        if self._held.pop(content, None) is not None:
            self._notify(content)

    def _notify(self, content: Content) -> None:
        watcher = self._watchers.get(content)
        if watcher is not None:
            watcher.changed[content] = None
