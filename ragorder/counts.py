"""Numbers of tokens as text."""

from __future__ import annotations

import re

__all__ = ["parse_count"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_count(text: str) -> int:
    """A number of tokens: "100000", "100_000", "25.6k" or "16K", with vLLM's units (k, m, g decimal; K, M, G binary).
    Raises ValueError for anything else, fractions of a token included."""
    found = re.fullmatch(r"([0-9]+(?:_[0-9]+)*)(\.[0-9]+)? ?([kmgKMG]?)", text.strip())
    if found is None or (found[2] and found[3] not in ("k", "m", "g")):
        raise ValueError(f"{text!r} is not a number of tokens: write 100000, 25.6k or 16K (k is 1,000, K 1,024)")
    whole, fraction, unit = found[1].replace("_", ""), (found[2] or "")[1:], _UNITS[found[3]]
    parts: int = 10 ** len(fraction)
    count, rest = divmod(int(whole + fraction) * unit, parts)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of tokens")
    return count
