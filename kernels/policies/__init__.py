"""Replacement policies of full tiers: device, host, disk (RAGCache section 5.1)."""

from ragorder.kernels.policies.base import Clocked, ReplacementPolicy, TierNode
from ragorder.kernels.policies.gdsf import GDSF
from ragorder.kernels.policies.history import History
from ragorder.kernels.policies.lfu import LFU
from ragorder.kernels.policies.lru import LRU
from ragorder.kernels.policies.pgdsf import PGDSF
from ragorder.kernels.policies.policies import POLICIES, make_policy
from ragorder.kernels.policies.tier import Tier
from ragorder.trie.tree import Key

__all__ = [
    "GDSF",
    "LFU",
    "LRU",
    "PGDSF",
    "POLICIES",
    "Clocked",
    "History",
    "Key",
    "ReplacementPolicy",
    "Tier",
    "TierNode",
    "make_policy",
]
