"""Token counts in a cloud's reported usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ragorder.clouds.rules import CacheRules, UsageFields
from ragorder.common.counts import reported_count

__all__ = ["CloudUsage", "read_cloud_usage"]

_KNOWN = (
    UsageFields("cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens", additive=True),
    UsageFields("cacheReadInputTokens", "cacheWriteInputTokens", "inputTokens", additive=True),
    UsageFields("prompt_tokens_details.cached_tokens", "prompt_tokens_details.cache_write_tokens", "prompt_tokens"),
    UsageFields("input_tokens_details.cached_tokens", "input_tokens_details.cache_write_tokens", "input_tokens"),
    UsageFields("prompt_cache_hit_tokens", "", "prompt_tokens"),
)


class CloudUsage(NamedTuple):
    """Tokens of a prompt: read from the cache, written into it, and all. A missing or impossible count is None."""

    cached_tokens: int | None = None
    written_tokens: int | None = None
    prompt_tokens: int | None = None


def read_cloud_usage(usage: Any, rules: CacheRules | None = None) -> CloudUsage:
    """Return the counts in an answer's `usage`, a mapping or an object, by the field names of `rules` or of the known
    APIs."""
    known = (rules.usage,) if rules is not None and rules.usage is not None else _KNOWN
    for fields in known:
        if _find(usage, fields.read) is None and _find(usage, fields.written) is None:
            continue
        read, written, prompt = (
            reported_count(_find(usage, name)) for name in (fields.read, fields.written, fields.prompt)
        )
        if fields.additive:
            prompt = None if prompt is None else prompt + (read or 0) + (written or 0)
        if prompt is not None and (read or 0) + (written or 0) > prompt:
            read = written = None
        return CloudUsage(read, written, prompt)
    return CloudUsage()


def _find(usage: Any, name: str) -> Any:
    if not name:
        return None
    found = usage
    for member in name.split("."):
        found = found.get(member) if isinstance(found, Mapping) else getattr(found, member, None)
    return found
