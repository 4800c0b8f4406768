"""Orderers for the models of clouds, made on first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

from ragorder.clouds import CacheRules, Prices, Provider, cache_rules
from ragorder.orderer import Orderer
from ragorder.protocols import OrdererLike
from ragorder.settings import Settings

# Used if only the model is known. Models of other providers have the same names on self-hosted engines.
_PROVIDERS: tuple[Provider, ...] = ("anthropic", "openai")


class ModelOrderer(NamedTuple):
    orderer: OrdererLike
    provider: Provider
    rules: CacheRules


class CloudOrderers:
    """An `Orderer.for_cloud` for each model with known cache rules. Thread-safe.

        CloudOrderers("anthropic", ttl="1h").of("claude-opus-5-5")

    Without `provider` the model's name determines it; a `ttl` that the model lacks becomes its default. Raises OSError
    or ValueError for an unreadable `prices` file, ValueError for settings of other engines.
    """

    def __init__(
        self,
        provider: Provider | None = None,
        *,
        ttl: str | None = None,
        prices: Prices | str | None = None,
        settings: Settings | None = None,
        wrap: Callable[[Orderer], OrdererLike] = lambda orderer: orderer,
    ) -> None:
        self._providers = _PROVIDERS if provider is None else (provider,)
        self._ttl = ttl
        self._prices = prices if isinstance(prices, Prices) else Prices.load(prices)
        self._settings = settings
        # Raises errors in the settings at once.
        Orderer.for_rules(CacheRules("any"), settings=self._settings)
        self._wrap = wrap
        # By generation and price: clients may name models freely.
        self._orderers: dict[tuple[str, float | None], ModelOrderer] = {}
        self._lock = Lock()

    def of(self, model: str) -> ModelOrderer | None:
        known = find_rules(model, self._providers, self._ttl)
        if known is None:
            return None
        rules, provider = known
        key = rules.name, self._prices.of(model)
        with self._lock:
            found = self._orderers.get(key)
            if found is None:
                orderer = Orderer.for_rules(rules, model=model, prices=self._prices, settings=self._settings)
                found = self._orderers[key] = ModelOrderer(self._wrap(orderer), provider, rules)
        return found


def find_rules(
    model: str, providers: Sequence[Provider] = _PROVIDERS, ttl: str | None = None
) -> tuple[CacheRules, Provider] | None:
    for provider in providers:
        for each in dict.fromkeys((ttl, None)):
            with suppress(ValueError):
                return cache_rules(provider, model, each), provider
    return None
