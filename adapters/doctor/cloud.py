"""Least prompt lengths, prices and reported counts of clouds that cache prompts, as read on 23 November 2026.

Sources: the providers' guides on prompt caching, anthropic 2.12, openai 2.54, LiteLLM 1.106's price map.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ragorder.adapters.usage import read_usage

__all__ = ["CloudRules", "CloudUsage", "read_cloud_usage", "rules_of"]

_MAX_COUNT = 1 << 32


class CloudRules(NamedTuple):
    """`minimum_tokens`: shorter prefixes are not kept; `write` and `read`: in multiples of the plain input price."""

    minimum_tokens: int
    write: float = 1.25
    read: float = 0.1


class CloudUsage(NamedTuple):
    """Of the `prompt_tokens` some were read from the cache and some written into it. None: not reported."""

    cached_tokens: int | None
    written_tokens: int | None
    prompt_tokens: int | None


# The first pattern that a model's name contains counts.
_MODELS = [
    (re.compile(pattern), rules)
    for pattern, rules in [
        (r"claude-(?:opus|sonnet)-5-5", CloudRules(512, read=0.05)),
        (r"claude-fable-5-1", CloudRules(512, read=0.025)),
        (r"claude-(?:opus-5|haiku-5-5|fable-5)", CloudRules(512)),
        (r"claude-opus-4-7", CloudRules(2048)),
        (r"claude-(?:opus-4-[56]|haiku-4-5)", CloudRules(4096)),
        (r"claude-(?:opus-4-8|sonnet-[45])", CloudRules(1024)),
        (r"gpt-6\.1", CloudRules(1024, read=0.05)),
        (r"gpt-(?:6|5\.6)", CloudRules(1024)),
        (r"gpt-(?:5|4\.1|4o)", CloudRules(1024, write=1.0)),
    ]
]


def rules_of(model: str) -> CloudRules | None:
    """None for a model that the table does not have."""
    name = model.lower()
    return next((rules for pattern, rules in _MODELS if pattern.search(name)), None)


def read_cloud_usage(usage: Any) -> CloudUsage:
    """From the `usage` of an answer: in OpenAI's words, where cached tokens are a part of the prompt's, or in those of
    Anthropic and Bedrock, which add up."""
    if isinstance(usage, Mapping):
        for read, written, plain in (
            ("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens"),
            ("cacheReadInputTokens", "cacheWriteInputTokens", "inputTokens"),
        ):
            if usage.get(read) is not None or usage.get(written) is not None:
                counts = [_count(usage.get(name)) for name in (read, written, plain)]
                return CloudUsage(counts[0], counts[1], sum(each or 0 for each in counts))
    known = read_usage(usage)
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    written_tokens = _count(details.get("cache_write_tokens")) if isinstance(details, Mapping) else None
    return CloudUsage(known.cached_tokens, written_tokens, known.prompt_tokens)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None
