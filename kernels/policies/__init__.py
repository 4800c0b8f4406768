"""Replacement policies of full tiers: device, host, disk (RAGCache section 5.1)."""

from ragorder.kernels.policies.awaited import AwaitedNodes
from ragorder.kernels.policies.base import Clocked, ReplacementPolicy, TierNode, policies
from ragorder.kernels.policies.forecast import Forecast
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
    "AwaitedNodes",
    "Clocked",
    "Forecast",
    "History",
    "Key",
    "ReplacementPolicy",
    "Tier",
    "TierNode",
    "make_policy",
    "policies",
]

policies.load(__name__, __path__)

POLICIES = tuple(policies.names)


def make_policy(name: str) -> ReplacementPolicy:
    """For one tier. Raises ValueError naming the choices."""
    if name not in POLICIES:
        raise ValueError(f"there is no replacement policy {name!r}: choose one of {', '.join(POLICIES)}")
    return policies[name]()
