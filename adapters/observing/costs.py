"""Costs of prompts at clouds, as metrics and statistics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from ragorder.clouds import Cost

_TOKENS = "ragorder_cost_tokens"
_MONEY = "ragorder_cost_money"
_PRICES = "ragorder_prices"
_UNCACHED = "uncached"


class CostMetrics:
    """Costs by order: "ragorder", "retrieval", and "uncached" for the same prompts without a cache."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge

        says = "Cost of prompts at a cloud, in input tokens at the plain price, by order."
        self._tokens = Counter(_TOKENS, says, ["order"], registry=registry)
        says = "Cost in money, of models in the table of prices."
        self._money = Counter(_MONEY, says, ["order", "currency"], registry=registry)
        self._prices = Gauge(_PRICES, "1 for the date of the table of prices.", ["date"], registry=registry)

    def count(self, cost: Cost, served: str, other: str, other_cost: Cost | None) -> None:
        orders = {served: cost.input_tokens, _UNCACHED: cost.prompt_tokens}
        if other_cost is not None:
            orders[other] = other_cost.share * cost.prompt_tokens
        for order, tokens in orders.items():
            self._tokens.labels(order).inc(max(0.0, tokens))
            if cost.price is not None:
                self._money.labels(order, cost.currency).inc(max(0.0, tokens) * cost.price / 1e6)
        if cost.price is not None:
            self._prices.labels(cost.prices_date).set(1)


@dataclass(frozen=True, slots=True)
class CostStats:
    """Costs at clouds: `tokens` at the plain price, and money for models in the table of prices. The other order's are
    None if not compared."""

    tokens: float
    uncached_tokens: float
    other_tokens: float | None
    money: float | None = None
    uncached_money: float | None = None
    other_money: float | None = None
    currency: str = ""
    prices_date: str = ""

    @property
    def share(self) -> float:
        return self.tokens / self.uncached_tokens if self.uncached_tokens else 1.0

    @property
    def saved_money(self) -> float | None:
        """Savings against no cache; negative if writes cost more than reads saved."""
        return None if self.money is None or self.uncached_money is None else self.uncached_money - self.money

    @classmethod
    def of(cls, families: Iterable[Metric], served: str, other: str) -> CostStats | None:
        tokens: defaultdict[str, float] = defaultdict(float)
        money: defaultdict[str, float] = defaultdict(float)
        currencies, dates = set(), set()
        for family in families:
            for sample in family.samples:
                if sample.name == f"{_TOKENS}_total":
                    tokens[sample.labels["order"]] += sample.value
                elif sample.name == f"{_MONEY}_total":
                    money[sample.labels["order"]] += sample.value
                    currencies.add(sample.labels["currency"])
                elif sample.name == _PRICES:
                    dates.add(sample.labels["date"])
        if _UNCACHED not in tokens:
            return None
        found = tokens[served], tokens[_UNCACHED], tokens.get(other)
        if len(currencies) != 1 or len(dates) != 1:
            return cls(*found)
        return cls(*found, money[served], money[_UNCACHED], money.get(other), currencies.pop(), dates.pop())
