"""Cache steps larger than common prefixes: large blocks, hybrid models."""

from __future__ import annotations

from math import gcd

from ragorder.adapters.doctor.case import Case, graded
from ragorder.adapters.doctor.finding import Finding

__all__ = ["check"]

_CHECK = "cache granularity"
_USUAL = 128
_LEAST = 16
_LARGE_STEPS = (
    "hybrid models (Mamba, linear attention, sliding windows) resume only at such steps: vLLM has finer ones with "
    "--prefix-match-unit if the model allows it; otherwise move shared text into one longer common prefix"
)
_SMALL_STEPS = "start vLLM with a smaller --block-size, or move shared text into one longer common prefix"


def check(case: Case) -> Finding:
    sharing = [(each, case.tokens(found.characters)) for each, found in case.beginnings]
    sharing = [(each, tokens) for each, tokens in sharing if tokens >= _LEAST]
    if not sharing:
        found = f"no request begins with {_LEAST} tokens of an earlier one"
        return Finding(
            _CHECK,
            "unknown",
            found,
            "see the text before the documents: without a common beginning no step can be judged",
        )
    step, source = case.block_size, "the server's blocks"
    if step is None:
        hits = {each.cached_tokens for each in case.log.requests if each.cached_tokens}
        step, source = gcd(*hits), "all hits are multiples of it"
        if len(hits) < 2 or step < _LEAST:
            return _unknown(len(hits), len(sharing))
    below = [each for each, tokens in sharing if tokens < step]
    found = f"steps of {step:,} tokens ({source}): "
    verdict = graded(len(below), len(sharing))
    if verdict == "good":
        return Finding(_CHECK, "good", f"{found}{len(sharing) - len(below):,} of {len(sharing):,} requests share one")
    found += f"{len(below):,} of {len(sharing):,} requests share less than one with an earlier request"
    return Finding(_CHECK, verdict, found, _LARGE_STEPS if step > _USUAL else _SMALL_STEPS)


def _unknown(hits: int, sharing: int) -> Finding:
    if hits > 1:
        return Finding(
            _CHECK, "good", f"hits of different lengths: fine enough for {sharing:,} requests that share a beginning"
        )
    hit = "hits of one length alone are" if hits else "no hit is"
    found = f"{hit} reported of {sharing:,} requests that share a beginning, so the log does not show the steps"
    return Finding(_CHECK, "unknown", found, "give the server's URL, or its block size with --block-size")
