"""Replacement policies of full tiers: device, host, disk (RAGCache section 5.1)."""

from ragorder.kernels.policies.base import Clocked, ReplacementPolicy, TierNode
from ragorder.kernels.policies.gdsf import GDSF
from ragorder.kernels.policies.history import History
from ragorder.kernels.policies.lfu import LFU
from ragorder.kernels.policies.lru import LRU
from ragorder.kernels.policies.pgdsf import PGDSF
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

_CHOICES: tuple[type[ReplacementPolicy], ...] = (PGDSF, GDSF, LRU, LFU)
_BY_NAME = {policy.name: policy for policy in _CHOICES}

POLICIES = tuple(_BY_NAME)


def make_policy(name: str) -> ReplacementPolicy:
    """For one tier. Raises ValueError naming the choices."""
    if name not in _BY_NAME:
        raise ValueError(f"there is no replacement policy {name!r}: choose one of {', '.join(POLICIES)}")
    return _BY_NAME[name]()
