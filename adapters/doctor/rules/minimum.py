"""Prompts shorter than a cloud's minimum for caching."""

from __future__ import annotations

from collections.abc import Collection

from ragorder.adapters.doctor.case import Case, graded
from ragorder.adapters.doctor.cloud import rules_of
from ragorder.adapters.doctor.finding import Finding

__all__ = ["check"]

_CHECK = "provider's minimum"
_ADVICE = (
    "a shorter prompt, or a cache breakpoint before that length, is silently not cached: send more or longer documents "
    "in one request, set breakpoints after the minimum, or use a model with a smaller one"
)


def check(case: Case) -> Finding:
    rules = {model: rules_of(model) for model in {each.model for each in case.log.requests}}
    minima = {model: found.minimum_tokens for model, found in rules.items() if found and found.minimum_tokens}
    if not minima:
        return Finding(_CHECK, "good", "no model of the log is known to have one")
    concerned = [each for each in case.log.requests if each.model in minima]
    # A prompt read from a cache was long enough, however it was counted.
    short = [each for each in concerned if not each.cached_tokens and case.length(each) < minima[each.model]]
    few = [
        each
        for each, shared in case.beginnings
        if each.model in minima and not each.cached_tokens and 0 < case.tokens(shared.characters) < minima[each.model]
    ]
    least = _range(minima.values())
    found = f"{least} tokens: {len(short):,} of {len(concerned):,} prompts are shorter"
    below = len(set(map(id, [*short, *few])))
    found += f", {below - len(short):,} more share less than that with an earlier one"
    verdict = graded(below, len(concerned))
    return Finding(_CHECK, verdict, found, None if verdict == "good" else _ADVICE)


def _range(values: Collection[int]) -> str:
    least, most = min(values), max(values)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
