"""Cells of tiers in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ARMS", "PromptStream", "TierSizes"]

ARMS = ("apc", "tiers")
"""vLLM's prefix cache alone, and with tiers."""


@dataclass(frozen=True, slots=True)
class PromptStream:
    """`working_set_tokens` is the reusable KV of the prompts: whole blocks, each prefix once."""

    prompts: Sequence[Sequence[int]]
    working_set_tokens: int

    @property
    def longest_tokens(self) -> int:
        return max(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class TierSizes:
    """`disk_bytes` is None without a disk."""

    blocks: int
    host_bytes: int
    disk_bytes: int | None
    working_set_tokens: int
