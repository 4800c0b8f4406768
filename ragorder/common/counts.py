"""Token and byte counts: reported, estimated, and parsed."""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any, Self

from ragorder.common.lock import run_or_defer

_logger = logging.getLogger("ragorder")
_CHARACTERS_PER_TOKEN = 4
_MOST = 1 << 32
_told: dict[str, object] = {}
_NUMBER = r"([0-9](?:_?[0-9]){0,17})(\.[0-9]{1,18})?"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTE_UNITS |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
"""Bytes of each unit, by its usual spelling."""
_SPELLED = {unit.lower(): size for unit, size in BYTE_UNITS.items()}


class Estimate(int):
    """A length in tokens that may differ from the engine's."""


class KnownTokens(int):
    """A length in tokens with the tokens, and the `salt` of a prompt that begins with them."""

    ids: Sequence[int]
    salt: str | None

    def __new__(cls, ids: Sequence[int], salt: str | None = None) -> Self:
        known = super().__new__(cls, len(ids))
        known.ids, known.salt = array("q", ids), salt
        return known

    @property
    def size(self) -> int:
        """Bytes."""
        return 8 * self + 128


def estimate_tokens(text: str) -> Estimate:
    return Estimate(-(-len(text) // _CHARACTERS_PER_TOKEN))


def reported_count(value: Any) -> int | None:
    """Return an engine's token count, or None unless it is a whole number from 0 to 2**32 - 1.

    The first invalid count of a process is logged. Never raises.
    """
    if value is None or (type(value) is int and 0 <= value < _MOST):
        return value
    with suppress(Exception):
        number: Any = value
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if is_number and 0 <= number < _MOST and (count := int(number)) == number:
            return count
    mark = object()
    # `setdefault` is atomic, so only one of two threads logs.
    if _told.setdefault("count", mark) is mark:
        message = "an engine reported an invalid token count (%s): it is ignored; later ones are not logged"
        run_or_defer(partial(_logger.warning, message, type(value).__name__))
    return None


def parse_count(text: str) -> int:
    """Return tokens from "100_000", "25.6k" or "16K", with vLLM's units (k, m, g; K, M, G binary)."""
    found = re.fullmatch(_NUMBER + " ?([kmgKMG]?)", text.strip())
    if found is None or (found[2] and found[3] not in ("k", "m", "g")):
        raise ValueError(f"{text!r} is not a number of tokens: write 100000, 25.6k or 16K (k is 1,000, K 1,024)")
    whole, fraction, unit = found[1].replace("_", ""), (found[2] or "")[1:], _UNITS[found[3]]
    parts: int = 10 ** len(fraction)
    count, rest = divmod(int(whole + fraction) * unit, parts)
    if rest:
        raise ValueError(f"{text!r} is not a whole number of tokens")
    return count


def parse_size(text: str, unit: int = 1) -> int:
    """Return bytes from "8GiB", "500MB", or a number of `unit` bytes."""
    found = re.fullmatch(_NUMBER + " ?([A-Za-z]*)", text.strip())
    size = _SPELLED.get(found[3].lower()) if found else None
    if found is None or size is None:
        raise ValueError(f"{text!r} is not a size: write 8GiB, 500MB or a number of bytes")
    size = size if found[3] else unit
    return round(float(found[1] + found[2]) * size) if found[2] else int(found[1]) * size
