"""Rules of OpenAI's prompt cache, read on 23 November 2026.

From GPT-5.6 on it resumes only at breakpoints; earlier generations resume at multiples of 128 tokens (GPT-5.5: 2,048),
without breakpoints and without a price for writes. Their TTL is 5 to 10 minutes; only the Responses API has 12 hours.
Sources: developers.openai.com/api/docs/guides/prompt-caching; docstrings of openai 2.54; LiteLLM 1.106's price map.
"""

from __future__ import annotations

from ragorder.clouds.rules import CacheRules, UsageFields, generation

__all__ = ["INTERVALS", "MARKED", "READ_MARKS", "TTLS", "rules"]

DATE = "2026-11-23"
SOURCE = "developers.openai.com, prompt caching; openai 2.54; LiteLLM 1.106"

MARKED = {"gpt-6.1": 0.05, "gpt-6": 0.1, "gpt-5.6": 0.1}
"""Read price of generations with breakpoints."""

READ_MARKS = (2, 50)
"""Numbers of first and of latest breakpoints of a request at which the provider looks for an entry, by the guide; by
the SDK's docstrings the latest 80. It writes the latest four, or in implicit mode three and its own."""

INTERVALS = {
    "gpt-5.5": (2048, 0.1),
    "gpt-5.4": (128, 0.1),
    "gpt-5.2": (128, 0.1),
    "gpt-5.1": (128, 0.1),
    "gpt-5": (128, 0.1),
    "gpt-4.1": (128, 0.25),
    "gpt-4o": (128, 0.5),
}
"""Interval and read price of earlier generations."""

TTLS = {"30m": (1800.0, 1.25), "12h": (43_200.0, 2.5)}
"""TTL in seconds and write price; the default is first."""

USAGE = UsageFields("prompt_tokens_details.cached_tokens", "prompt_tokens_details.cache_write_tokens", "prompt_tokens")

_MINIMUM_TOKENS = 1024
_UNMARKED_S = 300.0


def rules(model: str, ttl: str) -> CacheRules | None:
    """Return the rules of a model, or None if it is unknown. Generations without breakpoints ignore `ttl`: they have
    one TTL, and `cache_rules` refuses another."""
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
