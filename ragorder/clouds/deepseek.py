"""Rules of DeepSeek's context cache, read on 23 November 2026.

Prefixes are cached in whole units of 64 tokens, for hours, without breakpoints and without a price for writes. Not
modelled: a common prefix becomes a unit only when it is seen for the second time. Source:
api-docs.deepseek.com/guides/kv_cache.
"""

from __future__ import annotations

from ragorder.clouds.rules import CacheRules, UsageFields, generation

__all__ = ["MODELS", "TTLS", "rules"]

DATE = "2026-11-23"
SOURCE = "api-docs.deepseek.com, context caching"

MODELS = {"deepseek-chat": 0.1, "deepseek-reasoner": 0.1, "deepseek-v3": 0.1, "deepseek-v4": 0.1}
"""Upper bounds of read prices."""

TTLS = {"hours": (3600.0, 1.0)}

USAGE = UsageFields("prompt_cache_hit_tokens", "", "prompt_tokens")


def rules(model: str, ttl: str) -> CacheRules | None:
    """Return the rules of a model, or None if it is unknown."""
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
