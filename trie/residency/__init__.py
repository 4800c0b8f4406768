"""Residency: the part of the knowledge tree that the engine still holds."""

from ragorder.trie.residency.base import Lease, RequestedDocuments, Residency, TokenIds
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.residency.events import EventsResidency
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.lengths import LearnedLengths, ScopeLengths
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.none import NoResidency

__all__ = [
    "EngineBlocks",
    "EventsResidency",
    "FeedbackResidency",
    "LRUResidency",
    "LearnedLengths",
    "Lease",
    "NoResidency",
    "RequestedDocuments",
    "Residency",
    "ScopeLengths",
    "TokenIds",
]
