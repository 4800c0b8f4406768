"""Cost of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a prompt costs, its answer left out.

    Of `prompt_tokens`, `cached_tokens` were read from the cache and `written_tokens` written into it. `input_tokens`:
    so many at the plain price cost the same. `price`: of a million of these in `currency`, as of `prices_date`; None if
    no table has it. `reported`: by the provider, else predicted.
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
        """Of what the prompt would cost without a cache; more than 1 if writing has cost more than reading saved."""
        return self.input_tokens / self.prompt_tokens if self.prompt_tokens else 1.0

    @property
    def money(self) -> float | None:
        return None if self.price is None else self.input_tokens * self.price / 1e6

    @property
    def saved_money(self) -> float | None:
        """Negative if it costs more than without a cache."""
        return None if self.price is None else (self.prompt_tokens - self.input_tokens) * self.price / 1e6
