"""Cost of one prompt."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a prompt without its answer.

    `cached_tokens` of the `prompt_tokens` were read from the cache, and `written_tokens` written into it.
    `input_tokens` is the number of tokens at the plain price that cost the same. `price` is for a million of them in
    `currency`, as of `prices_date`, or None if no table has it. `reported`: counts are the provider's, else predicted.
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
        """Money saved by the cache; negative if the prompt costs more than without it."""
        return None if self.price is None else (self.prompt_tokens - self.input_tokens) * self.price / 1e6
