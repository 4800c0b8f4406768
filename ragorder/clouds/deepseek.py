"""Rules of DeepSeek's context cache, read on 23 November 2026.

Prefixes are kept in whole units of 64 tokens, for hours, without marks and without a price for writes. What is not
modelled: a common prefix becomes a unit of its own only when it is seen for the second time. Source:
api-docs.deepseek.com/guides/kv_cache.
"""

from __future__ import annotations

from ragorder.clouds.names import generation
from ragorder.clouds.rules import CacheRules, UsageFields

__all__ = ["MODELS", "TTLS", "rules"]

DATE = "2026-11-23"
SOURCE = "api-docs.deepseek.com, context caching"

MODELS = {"deepseek-chat": 0.1, "deepseek-reasoner": 0.1, "deepseek-v3": 0.1, "deepseek-v4": 0.1}
"""Read price, at most."""

TTLS = {"hours": (3600.0, 1.0)}

USAGE = UsageFields("prompt_cache_hit_tokens", "", "prompt_tokens")


def rules(model: str, ttl: str) -> CacheRules | None:
    """None for an unknown model."""
    found = generation(model, MODELS, variants=True)
    if found is None:
        return None
    ttl_s, write = TTLS[ttl]
    return CacheRules(
        f"DeepSeek, {found}",
        minimum_tokens=64,
        resume="interval",
        interval_tokens=64,
        marks=0,
        ttl_s=ttl_s,
        write=write,
        read=MODELS[found],
        usage=USAGE,
        source=SOURCE,
        date=DATE,
    )
