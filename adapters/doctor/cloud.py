"""Rules of the cloud that a model's name belongs to."""

from __future__ import annotations

from functools import cache

from ragorder.clouds import CacheRules, cache_rules
from ragorder.clouds.tables import PROVIDERS

__all__ = ["rules_of"]


@cache
def rules_of(model: str) -> CacheRules | None:
    """None for a model that no table has."""
    for provider in PROVIDERS:
        try:
            return cache_rules(provider, model)
        except ValueError:
            continue
    return None
