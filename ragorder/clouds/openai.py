"""Rules of OpenAI's prompt cache, read on 23 November 2026.

From GPT-5.6 on it resumes at marks alone; earlier generations at multiples of 128 tokens (GPT-5.5: 2,048), without
marks and without a price for writes. Their entries live for 5 to 10 minutes; 12 hours are of the Responses API.
Sources: developers.openai.com/api/docs/guides/prompt-caching; docstrings of openai 2.54; LiteLLM 1.106's price map.
"""

from __future__ import annotations

from ragorder.clouds.names import generation
from ragorder.clouds.rules import CacheRules, UsageFields

__all__ = ["INTERVALS", "MARKED", "READ_MARKS", "TTLS", "rules"]

DATE = "2026-11-23"
SOURCE = "developers.openai.com, prompt caching; openai 2.54; LiteLLM 1.106"

MARKED = {"gpt-6.1": 0.05, "gpt-6": 0.1, "gpt-5.6": 0.1}
"""Read price of generations with marks."""

READ_MARKS = (2, 50)
"""First and latest marks of a request at which an entry is looked for, by the guide; the SDK's docstrings say the
latest 80. Written are the latest four, in implicit mode three and the provider's own."""

INTERVALS = {
    "gpt-5.5": (2048, 0.1),
    "gpt-5.4": (128, 0.1),
    "gpt-5.2": (128, 0.1),
    "gpt-5.1": (128, 0.1),
    "gpt-5": (128, 0.1),
    "gpt-4.1": (128, 0.25),
    "gpt-4o": (128, 0.5),
}
"""Interval and read price of those before."""

TTLS = {"30m": (1800.0, 1.25), "12h": (43_200.0, 2.5)}
"""Life in seconds and write price, the default first."""

USAGE = UsageFields("prompt_tokens_details.cached_tokens", "prompt_tokens_details.cache_write_tokens", "prompt_tokens")

_MINIMUM_TOKENS = 1024
_UNMARKED_S = 300.0


def rules(model: str, ttl: str) -> CacheRules | None:
    """None for an unknown model. Generations without marks have one life, whatever `ttl`: `cache_rules` refuses it."""
    found = generation(model, MARKED, variants=True)
    if found is not None:
        ttl_s, write = TTLS[ttl]
        return CacheRules(
            f"OpenAI, {found}",
            minimum_tokens=_MINIMUM_TOKENS,
            marks=4,
            read_marks=READ_MARKS,
            ttl_s=ttl_s,
            ttl=ttl,
            write=write,
            read=MARKED[found],
            usage=USAGE,
            source=SOURCE,
            date=DATE,
        )
    found = generation(model, INTERVALS, variants=True)
    if found is None:
        return None
    interval_tokens, read = INTERVALS[found]
    return CacheRules(
        f"OpenAI, {found}",
        minimum_tokens=_MINIMUM_TOKENS,
        resume="interval",
        interval_tokens=interval_tokens,
        marks=0,
        ttl_s=_UNMARKED_S,
        write=1.0,
        read=read,
        usage=USAGE,
        source=SOURCE,
        date=DATE,
    )
