"""Orderer that follows simulated tiers by their KV events."""

from __future__ import annotations

from typing import NamedTuple

from ragorder.benchmarks.ragcache.replacement.streams import DocumentStream
from ragorder.benchmarks.ragcache.replacement.tiers import SYSTEM_TOKENS, TwoTiers
from ragorder.orderer import Orderer
from ragorder.trie.residency.blocks import EngineBlocks

__all__ = ["EventsOrderer"]

_BLOCK_SIZE = 16
_MAX_BLOCKS = 1 << 20


class _Blocks(NamedTuple):
    """Of a node: the hashes of those in which its last tokens lie, the one before, and the tokens after the last."""

    hashes: tuple[tuple[int, int], ...]
    last: tuple[int, int]
    rest: list[int]


class EventsOrderer:
    """An orderer without a mirror of its own: what the tiers hold it learns from events, as from a vLLM's."""

    def __init__(self, stream: DocumentStream) -> None:
        tokens = stream.tokens
        self._blocks = EngineBlocks(_BLOCK_SIZE, _MAX_BLOCKS)
        prefix = [0] * SYSTEM_TOKENS
        hashes = tuple((-1, place) for place in range(SYSTEM_TOKENS // _BLOCK_SIZE))
        self._blocks.store(hashes, None, prefix)
        self._front = _Blocks(hashes, hashes[-1], [])
        self._nodes: dict[int, _Blocks] = {}
        self._tokens = tokens
        self.orderer = Orderer(
            key=lambda document: document,
            tokens=tokens.__getitem__,
            token_ids=self._token_ids,
            prefix_ids=prefix,
            blocks=self._blocks,
            capacity_tokens=None,
            block_size=_BLOCK_SIZE,
            prefix_tokens=SYSTEM_TOKENS,
            suffix_tokens=0,
            strict=True,
        )

    def publish(self, tiers: TwoTiers, path: list[int], documents: list[int]) -> None:
        """The events of the last request, which took this path."""
        for node in tiers.left:
            self._blocks.remove(self._nodes.pop(node).hashes)
        entered = set(tiers.entered)
        for node, document in zip(path, documents, strict=True):
            if node in entered:
                parent = tiers.parent(node)
                self._store(node, self._front if parent is None else self._nodes[parent], document)

    def _store(self, node: int, parent: _Blocks, document: int) -> None:
        tokens = parent.rest + self._token_ids(document)
        count = len(tokens) // _BLOCK_SIZE
        hashes = tuple((node, place) for place in range(count))
        if hashes:
            self._blocks.store(hashes, parent.last, tokens[: count * _BLOCK_SIZE])
        self._nodes[node] = _Blocks(hashes, hashes[-1] if hashes else parent.last, tokens[count * _BLOCK_SIZE :])

    def _token_ids(self, document: int) -> list[int]:
        return [document + 1] * self._tokens[document]
