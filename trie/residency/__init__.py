"""Residency: which parts of the knowledge tree the engine still holds."""

from ragorder.trie.residency.base import KnowsTiers, Lease, Loads, TierLevel
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.lengths import LearnedLengths, ScopeLengths
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.pool import Pool
from ragorder.trie.tree import RequestedDocuments, TokenIds

__all__ = [
    "FeedbackResidency",
    "KnowsTiers",
    "LRUResidency",
    "LearnedLengths",
    "Lease",
    "Loads",
    "Pool",
    "RequestedDocuments",
    "ScopeLengths",
    "TierLevel",
    "TokenIds",
]
