"""Rules of Amazon Bedrock's prompt cache, read on 23 November 2026.

Claude on Bedrock has Anthropic's rules, and Converse its own words for marks and usage. Sources: the API reference of
CachePointBlock and TokenUsage; LiteLLM 1.106's price map. Nova's write price is in no source: pass `CacheRules`.
"""

from __future__ import annotations

from dataclasses import replace

from ragorder.clouds import anthropic
from ragorder.clouds.rules import CacheRules, UsageFields

__all__ = ["MODELS", "TTLS", "rules"]

DATE = "2026-11-23"
SOURCE = "docs.aws.amazon.com, Bedrock API reference; LiteLLM 1.106"

MODELS, TTLS = anthropic.MODELS, anthropic.TTLS

USAGE = UsageFields("cacheReadInputTokens", "cacheWriteInputTokens", "inputTokens", additive=True)


def rules(model: str, ttl: str) -> CacheRules | None:
    """None for an unknown model."""
    found = anthropic.rules(model, ttl)
    if found is None:
        return None
    name = found.name.replace("Anthropic", "Bedrock")
    return replace(found, name=name, usage=USAGE, source=SOURCE, date=DATE)
