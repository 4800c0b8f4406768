"""Residency: the part of the knowledge tree that the engine still holds."""

from ragorder.trie.residency.base import Lease, Loads, Place, Places, RequestedDocuments, Residency, TokenIds
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.lengths import LearnedLengths, ScopeLengths
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.pool import Pool

__all__ = [
    "FeedbackResidency",
    "LRUResidency",
    "LearnedLengths",
    "Lease",
    "Loads",
    "Place",
    "Places",
    "Pool",
    "RequestedDocuments",
    "Residency",
    "ScopeLengths",
    "TokenIds",
]
