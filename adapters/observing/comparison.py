"""Comparison of the served order, as reported, with the other, as predicted.

- If reports exceed predictions, the mean excess is added to the other order. If they fall short, other clients used the
  cache: the other prediction shrinks in proportion.
- Uncertainty: half the mean absolute error plus three standard errors of the mean; limits from a simulated engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

__all__ = ["Comparison", "Reports", "compare"]

_MIN_REPORTS = 8
_MAX_ERROR_SHARE = 0.02
_COUNT = "if lengths are estimated, count them: serve --tokenizer MODEL, or Document(tokens=…)"


@dataclass(frozen=True, slots=True)
class Reports:
    """Sums over requests with reported cached tokens; `absolute` and `squared` sum differences from the prediction."""

    count: int
    reported: int
    predicted: int
    absolute: int
    squared: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cached tokens of the order that is not served, and their error; None if unknown, for this `reason`."""

    other_tokens: int | None
    error_tokens: int | None
    reason: str | None


def compare(served: int, prompt_tokens: int, cached_tokens: int, predicted_other: int, reports: Reports) -> Comparison:
    count = reports.count
    if not served:
        return Comparison(None, None, "no request has ended yet")
    if not count:
        return Comparison(None, None, "predicted only: no request reported its cached tokens")
    if 2 * count < served:
        said = f"predicted only: {count:,} of {served:,} requests reported their cached tokens"
        return Comparison(None, None, said)
    if count < _MIN_REPORTS:
        said = f"too early: {count:,} of the first {_MIN_REPORTS} requests reported their cached tokens"
        return Comparison(None, None, said)
    excess = (reports.reported - reports.predicted) / count
    if excess >= 0:
        other_tokens = predicted_other + excess * served
    else:
        other_tokens = predicted_other * reports.reported / reports.predicted
    other_tokens = min(other_tokens, float(prompt_tokens))
    deviation = sqrt(max(0.0, reports.squared / count - excess**2))
    error_tokens = served * (reports.absolute / count / 2 + 3 * deviation / sqrt(count))
    difference = abs(cached_tokens - other_tokens)
    reason = None
    if error_tokens > _MAX_ERROR_SHARE * prompt_tokens:
        off = f"{reports.absolute / count:,.0f} tokens a request"
        share = 100 * min(1.0, error_tokens / prompt_tokens) if prompt_tokens else 100.0
        reason = (
            f"predictions are off by {off}, and the other order is uncertain by {share:.1f} % of the prompts; {_COUNT}"
        )
    elif difference < error_tokens:
        reason = f"the orders differ by {difference:,.0f} tokens, and predictions are uncertain by {error_tokens:,.0f}"
    if reason is not None:
        return Comparison(None, round(error_tokens), f"cannot compare: {reason}")
    return Comparison(round(other_tokens), round(error_tokens), None)
