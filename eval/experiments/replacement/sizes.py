"""Tier sizes of the replacement suites."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["KIB_PER_TOKEN", "TierSize"]

KIB_PER_TOKEN = 128
"""What a token's keys and values take: those of Mistral-7B (RAGCache Table 1)."""


@dataclass(frozen=True, slots=True)
class TierSize:
    """A size in GiB, or in percent of the stream's working set."""

    gib: float | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> TierSize:
        """From "8GiB" or "5%". Raises ValueError."""
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|%)", text)
        if match is None or not float(match[1]):
            raise ValueError(f"{text!r} is no size of a tier: give GiB (8GiB) or a share of the working set (5%)")
        number = float(match[1])
        return cls(gib=number) if match[2] == "GiB" else cls(percent=number)

    def tokens(self, working_set_tokens: int, kib_per_token: int = KIB_PER_TOKEN) -> int:
        if self.gib is not None:
            return int(self.gib * (1 << 20) / kib_per_token)
        assert self.percent is not None
        return int(self.percent / 100 * working_set_tokens)
