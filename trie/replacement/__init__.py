"""Replacement: what a tier (device, host, disk) gives up first when it is full (RAGCache section 5.1)."""

from ragorder.trie.replacement.base import Clocked, ReplacementPolicy, TierNode
from ragorder.trie.replacement.either import Either
from ragorder.trie.replacement.gdsf import GDSF
from ragorder.trie.replacement.history import History
from ragorder.trie.replacement.lfu import LFU
from ragorder.trie.replacement.lru import LRU
from ragorder.trie.replacement.pgdsf import PGDSF
from ragorder.trie.replacement.policies import POLICIES, make_policy
from ragorder.trie.replacement.tier import Tier
from ragorder.trie.tree import Key

__all__ = [
    "GDSF",
    "LFU",
    "LRU",
    "PGDSF",
    "POLICIES",
    "Clocked",
    "Either",
    "History",
    "Key",
    "ReplacementPolicy",
    "Tier",
    "TierNode",
    "make_policy",
]
