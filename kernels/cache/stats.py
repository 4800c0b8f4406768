"""What the tiers hold and have done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["CacheStats", "TierStats", "TierTokens"]


class TierTokens(NamedTuple):
    """Tokens by the tier in which they were found."""

    device: int = 0
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot of one tier.

    - `nodes` and `tokens` are what it holds of the tree (`tokens` is None of the disk, which does not count them), and
      `bytes` is what these take; `used_bytes` is all that is taken, by leases and by copies under way as well;
      `capacity_bytes` is what there is.
    - `hit_tokens` were found here by requests that were computed.
    - `received` nodes were copied here from the tier above (of the device: from one below), `evicted` ones were given
      up for others, `failed` ones could not be copied to the device from here.
    - `refused` counts what was not taken in or not given back, by reason; it also names why there is no disk.
    """

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
    """A snapshot of all tiers. `leases` are the requests that hold blocks, `loads` nodes on their way to the device,
    `copies` copies under way between any two tiers. `requests` were computed, and found `hit_tokens` of the tiers
    cached; `new_tokens` are those that they computed of their nodes."""

    device: TierStats
    host: TierStats
    disk: TierStats
    leases: int
    loads: int
    copies: int
    requests: int
    new_tokens: int
