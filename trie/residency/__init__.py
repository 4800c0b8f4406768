"""Residency: which part of the knowledge tree the engine still holds."""

from ragorder.trie.residency.base import Lease, Residency, Sought, TokenIds
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.residency.events import EventsResidency
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.learning import LearnedLengths, ScopeLengths
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
    "Residency",
    "ScopeLengths",
    "Sought",
    "TokenIds",
]
