"""Cache sizes of engines."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ragorder.common.counts import parse_count


@dataclass(frozen=True, slots=True)
class Capacity:
    """A cache size: tokens, a share of the corpus in percent, or unlimited. Capacity.parse("5%").resolve(2_000_000)"""

    tokens: int | None = None
    percent: float | None = None

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.percent else "unlimited" if self.tokens is None else str(self.tokens)

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """From "100000", "100k", "5%" or "unlimited". Raises ValueError."""
        if text == "unlimited":
            return cls()
        share = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", text)
        if share and float(share[1]):
            return cls(percent=float(share[1]))
        try:
            tokens = parse_count(text)
        except ValueError:
            tokens = 0
        if not tokens:
            raise ValueError(
                f"{text!r} is no capacity: give tokens (100000 or 100k), a share of the corpus (5%) or unlimited"
            )
        return cls(tokens=tokens)

    def resolve(self, corpus_tokens: int) -> int | None:
        """Tokens; None: unlimited. Raises ValueError for less than a token."""
        if self.percent is None:
            return self.tokens
        tokens = int(corpus_tokens * self.percent / 100)
        if not tokens:
            raise ValueError(f"{self.percent}% of {corpus_tokens:,} tokens is no cache: raise --capacity-tokens")
        return tokens
