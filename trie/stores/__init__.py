"""Stores: where the bytes of what a tier holds are kept when they are in no engine's memory."""

from ragorder.trie.stores.counters import StoreCounters
from ragorder.trie.stores.folder import StoreRefusedError
from ragorder.trie.stores.store import ChunkStore
from ragorder.trie.stores.survey import Survey, survey

__all__ = ["ChunkStore", "StoreCounters", "StoreRefusedError", "Survey", "survey"]
