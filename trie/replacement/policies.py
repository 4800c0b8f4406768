"""The policies by name."""

from __future__ import annotations

from ragorder.trie.replacement.base import ReplacementPolicy
from ragorder.trie.replacement.gdsf import GDSF
from ragorder.trie.replacement.lfu import LFU
from ragorder.trie.replacement.lru import LRU
from ragorder.trie.replacement.pgdsf import PGDSF

__all__ = ["POLICIES", "make_policy"]

_CHOICES: tuple[type[ReplacementPolicy], ...] = (PGDSF, GDSF, LRU, LFU)
_BY_NAME = {policy.name: policy for policy in _CHOICES}

POLICIES = tuple(_BY_NAME)


def make_policy(name: str) -> ReplacementPolicy:
    """A policy for one tier. Raises ValueError naming the choices."""
    if name not in _BY_NAME:
        raise ValueError(f"there is no replacement policy {name!r}: choose one of {', '.join(POLICIES)}")
    return _BY_NAME[name]()
