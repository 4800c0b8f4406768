"""Residency: the part of the knowledge tree that the engine still holds."""

from ragorder.trie.residency.base import Lease, RequestedDocuments, Residency, TokenIds
from ragorder.trie.residency.blocks import EngineBlocks
from ragorder.trie.residency.events import EventsResidency
from ragorder.trie.residency.feedback import FeedbackResidency
from ragorder.trie.residency.followed import FollowedPool
from ragorder.trie.residency.junctions import JunctionsResidency
from ragorder.trie.residency.lengths import LearnedLengths, ScopeLengths
from ragorder.trie.residency.lru import LRUResidency
from ragorder.trie.residency.mark_plan import CacheReport, MarkPlan, RequestTokens
from ragorder.trie.residency.marks import MarkedFeedback, MarksResidency
from ragorder.trie.residency.places import Loads, Place, Places
from ragorder.trie.residency.pool import Pool

__all__ = [
    "CacheReport",
    "EngineBlocks",
    "EventsResidency",
    "FeedbackResidency",
    "FollowedPool",
    "JunctionsResidency",
    "LRUResidency",
    "LearnedLengths",
    "Lease",
    "Loads",
    "MarkPlan",
    "MarkedFeedback",
    "MarksResidency",
    "Place",
    "Places",
    "Pool",
    "RequestTokens",
    "RequestedDocuments",
    "Residency",
    "ScopeLengths",
    "TokenIds",
]
