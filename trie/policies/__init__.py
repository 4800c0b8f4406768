"""Replacement policies of device, host and disk tiers (RAGCache section 5.1)."""

from ragorder.trie.policies.base import (
    GDSF,
    LFU,
    LRU,
    PGDSF,
    AwaitedNodes,
    Clocked,
    Forecast,
    ReplacementPolicy,
    TierNode,
    policies,
)
from ragorder.trie.policies.tier import History, Tier
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

POLICIES = tuple(policies.names)


def make_policy(name: str) -> ReplacementPolicy:
    if name not in POLICIES:
        raise ValueError(f"there is no replacement policy {name!r}: choose one of {', '.join(POLICIES)}")
    return policies[name]()
