"""Prices of input tokens, from a TOML file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ragorder.clouds.rules import generation

PRICES_VARIABLE = "RAGORDER_PRICES"

_MOST = 1e12
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
        """Read a TOML file (default: RAGORDER_PRICES, or the package's own)."""
        from ragorder.common.jsonl import decode_toml

        where = Path(path or os.environ.get(PRICES_VARIABLE) or _OWN)
        try:
            return cls._of(decode_toml(where.read_bytes()))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    @classmethod
    def _of(cls, fields: Mapping[str, Any]) -> Self:
        date, currency = fields.get("date"), fields.get("currency", "USD")
        if not date or not isinstance(currency, str):
            raise ValueError("date and currency must be given, such as date = '2026-11-23'")
        prices = fields.get("per_million", {})
        if not isinstance(prices, Mapping):
            raise ValueError("per_million must be a table of models and their prices")
        for name, price in prices.items():
            if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < _MOST:
                raise ValueError(f"per_million.{name}: {price!r} is no price of a million tokens")
        return cls(str(date), currency, {str(name).lower(): float(price) for name, price in prices.items()})

    def of(self, model: str) -> float | None:
        found = generation(model, self.per_million)
        return None if found is None else self.per_million[found]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a prompt without its answer.

    `input_tokens` at the plain price cost the same. `price` is for a million of them, or None if no table has it.
    `reported`: counts are the provider's, else predicted.
    """

    prompt_tokens: float
    cached_tokens: float
    written_tokens: float
    input_tokens: float
    price: float | None = None
    currency: str = ""
    prices_date: str = ""
    reported: bool = False

    @property
    def share(self) -> float:
        """Share of the cost without a cache; above 1 if writing cost more than reading saved."""
        return self.input_tokens / self.prompt_tokens if self.prompt_tokens else 1.0

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.input_tokens * self.price / 1e6

    @property
    def saved_money(self) -> float | None:
        """Negative if writing cost more than reading saved."""
        return None if self.price is None else (self.prompt_tokens - self.input_tokens) * self.price / 1e6
