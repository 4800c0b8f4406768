"""Rules of Anthropic's prompt cache, read on 23 November 2026.

Sources: platform.claude.com/docs/en/build-with-claude/prompt-caching; docstrings of anthropic 2.12; LiteLLM 1.106's
price map (minimum lengths and prices by model).
"""

from __future__ import annotations

from typing import NamedTuple

from ragorder.clouds.rules import CacheRules, UsageFields, generation

__all__ = ["MODELS", "TTLS", "rules"]

DATE = "2026-11-23"
SOURCE = "platform.claude.com, prompt caching; anthropic 2.12; LiteLLM 1.106"


class Generation(NamedTuple):
    minimum_tokens: int
    read: float = 0.1


MODELS = {
    "claude-opus-5-5": Generation(512, 0.05),
    "claude-opus-5": Generation(512),
    "claude-opus-4-8": Generation(1024),
    "claude-opus-4-7": Generation(2048),
    "claude-opus-4-6": Generation(4096),
    "claude-opus-4-5": Generation(4096),
    "claude-sonnet-5-5": Generation(512, 0.05),
    "claude-sonnet-5": Generation(1024),
    "claude-sonnet-4-6": Generation(1024),
    "claude-sonnet-4-5": Generation(1024),
    # No source has the read price of these two.
    "claude-haiku-5-5": Generation(512),
    "claude-fable-5-2": Generation(512),
    "claude-haiku-4-5": Generation(4096),
    "claude-fable-5-1": Generation(512, 0.025),
    "claude-fable-5": Generation(512),
}
"""Minimum and read price by generation."""

TTLS = {"5m": (300.0, 1.25), "1h": (3600.0, 2.0)}
"""TTL in seconds and write price; the default is first."""

USAGE = UsageFields("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens", additive=True)


def rules(model: str, ttl: str) -> CacheRules | None:
    """Return the rules of a model, or None if it is unknown."""
    found = generation(model, MODELS)
    if found is None:
        return None
    minimum_tokens, read = MODELS[found]
    ttl_s, write = TTLS[ttl]
    return CacheRules(
        f"Anthropic, {found}",
        minimum_tokens=minimum_tokens,
        marks=4,
        lookback_parts=20,
        ttl_s=ttl_s,
        ttl=ttl,
        write=write,
        read=read,
        usage=USAGE,
        source=SOURCE,
        date=DATE,
    )
