"""Residency: which part of the knowledge tree the engine still holds."""

from ragorder.trie.residency.base import Lease, Residency
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.none import NoResidency

__all__ = ["LRUResidency", "Lease", "NoResidency", "Residency"]
