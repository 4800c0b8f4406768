"""Prices of input tokens, from a TOML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, Self

from ragorder.clouds.names import generation

__all__ = ["PRICES_VARIABLE", "Prices"]

PRICES_VARIABLE = "RAGORDER_PRICES"

_OWN = Path(__file__).with_name("prices.toml")


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a million plain input tokens in `currency`, by model, as of `date`.

    Prices.load("prices.toml").of("claude-opus-5-5")
    """

    date: str
    currency: str = "USD"
    per_million: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Self:
        """Read a TOML file (default: the one that RAGORDER_PRICES names, or the package's own). Raises OSError, or
        ValueError with file and field."""
        from ragorder.common.jsonl import decode_toml

        where = Path(path or os.environ.get(PRICES_VARIABLE) or _OWN)
        try:
            return cls._of(decode_toml(where.read_bytes()))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> Self:
        date, currency = fields.get("date"), fields.get("currency", "USD")
        if not date or not isinstance(currency, str):
            raise ValueError("date and currency must be given, such as date = '2026-11-23'")
        prices = fields.get("per_million", {})
        for name, price in prices.items():
            if isinstance(price, bool) or not isinstance(price, int | float) or not isfinite(price) or price < 0:
                raise ValueError(f"per_million.{name}: {price!r} is no price of a million tokens")
        return cls(str(date), currency, {str(name).lower(): float(price) for name, price in prices.items()})

    def of(self, model: str) -> float | None:
        """Return the price of a model, or None if it is not listed."""
        found = generation(model, self.per_million)
        return None if found is None else self.per_million[found]
