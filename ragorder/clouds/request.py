"""Marks and cost of one request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from ragorder.clouds.cost import Cost
from ragorder.clouds.prices import Prices
from ragorder.trie.cache_rules import CacheRules
from ragorder.trie.residency import CacheReport, MarkPlan

__all__ = ["CloudModel", "CloudRequest"]


@dataclass(frozen=True, slots=True)
class CloudModel:
    """A provider's model: the `rules` of its cache, and its name among `prices`."""

    rules: CacheRules
    name: str | None = None
    prices: Prices | None = None

    @property
    def price(self) -> float | None:
        return None if self.prices is None or self.name is None else self.prices.of(self.name)


class CloudRequest:
    """A request's part of an `Ordering`. `publish` is called at its first token."""

    __slots__ = ("_plan", "_publish", "model")

    def __init__(self, model: CloudModel, plan: MarkPlan, publish: Callable[[], None]) -> None:
        self.model = model
        self._plan = plan
        self._publish = publish

    @property
    def breakpoints(self) -> Sequence[int]:
        return self._plan.breakpoints

    def readable(self) -> None:
        self._publish()

    def report(self, cached_tokens: float | None, written_tokens: float | None, prompt_tokens: float | None) -> None:
        self._plan.report = CacheReport(_count(cached_tokens), _count(written_tokens), _count(prompt_tokens))

    @property
    def cost(self) -> Cost:
        prompt, cached, written = self._plan.tokens
        model = self.model
        return Cost(
            prompt,
            cached,
            written,
            model.rules.cost(prompt, cached, written),
            model.price,
            model.prices.currency if model.prices is not None else "",
            model.prices.date if model.prices is not None else "",
            self._plan.report.cached_tokens is not None,
        )


def _count(tokens: object) -> float | None:
    """None for what is no number of tokens."""
    if isinstance(tokens, bool) or not isinstance(tokens, int | float):
        return None
    return float(tokens) if isfinite(tokens) and tokens >= 0 else None
