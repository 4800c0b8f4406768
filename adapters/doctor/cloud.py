"""Rules and reported counts of clouds, found by the model's name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ragorder.adapters.usage import read_usage
from ragorder.clouds import CacheRules, CloudUsage, cache_rules, read_cloud_usage

__all__ = ["read_report", "rules_of"]

# DeepSeek's models have the same names on self-hosted engines.
_PROVIDERS = ("anthropic", "openai")


def rules_of(model: str) -> CacheRules | None:
    """Return a model's rules with the default TTL, or None."""
    for provider in _PROVIDERS:
        with suppress(ValueError):
            return cache_rules(provider, model)
    return None


def read_report(usage: Any) -> CloudUsage:
    """Return the counts in an answer's `usage`, of a cloud or an engine. LiteLLM's has the names of two APIs."""
    cloud = read_cloud_usage(usage)
    if cloud.prompt_tokens is not None:
        return cloud
    engine = read_usage(usage)
    return CloudUsage(engine.cached_tokens, cloud.written_tokens, engine.prompt_tokens)
