"""Snapshots of the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class TierTokens(NamedTuple):
    device: int = 0
    host: int = 0
    disk: int = 0

    @classmethod
    def of(cls, counted: Iterable[tuple[str, int]]) -> TierTokens:
        """Add up (tier, tokens)."""
        tokens = dict.fromkeys(cls._fields, 0)
        for tier, count in counted:
            tokens[tier] += count
        return cls(**tokens)

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class CacheTierStats:
    """`nodes`, `tokens` (None for the disk) and `bytes` are the tree's; `used_bytes` adds leases and copies.
    `hit_tokens` were found here, `received` nodes copied to here, `failed` ones not copied from here. `refused` is by
    reason."""

    nodes: int = 0
    tokens: int | None = 0
    bytes: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    hit_tokens: int = 0
    received: int = 0
    evicted: int = 0
    failed: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """`loads` and `copies` are running; `new_tokens` were computed for the tree."""

    device: CacheTierStats
    host: CacheTierStats
    disk: CacheTierStats
    leases: int
    loads: int
    copies: int
    requests: int
    new_tokens: int
