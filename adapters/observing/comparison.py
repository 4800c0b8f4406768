"""The served order, which the engine reports, against the other one, which can only be predicted.

Of each request there are two predictions, one for each order, made in the same way with the same lengths. Where the
engine reports what the served order had, the error of its prediction is known, and says how far the other's is to be
trusted:

- A report that exceeds the prediction found more in front of or in the documents than was thought, and the other order
  would have found the same: the mean excess is added to the other's prediction. Where reports fall short, others used
  the cache: the other's prediction falls short in the same proportion.
- What is left is uncertain by half the mean absolute error, for a bias need not be the same for both orders, and by
  three standard errors of the mean, for chance.

The bounds were chosen on a simulated engine (tests/test_comparison.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

__all__ = ["Comparison", "Reports", "compare"]

_MIN_REPORTS = 8
_MAX_ERROR_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Reports:
    """Sums over the requests whose cached tokens the engine reported: `reported` and `predicted` tokens, and the
    `absolute` and `squared` differences of the two."""

    count: int
    reported: int
    predicted: int
    absolute: int
    squared: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the order that is not served would have had (None: that cannot be said, and `reason` says why), and by how
    many tokens that may be wrong (None: there is no telling)."""

    other_tokens: int | None
    error_tokens: int | None
    reason: str | None


def compare(served: int, prompt_tokens: int, cached_tokens: int, predicted_other: int, reports: Reports) -> Comparison:
    """The comparison over `served` requests, which had `cached_tokens` in the order that they were served in."""
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
        reason = f"predictions are off by {off}, and the other order is uncertain by {share:.1f} % of the prompts"
    elif difference < error_tokens:
        reason = f"the orders differ by {difference:,.0f} tokens, and predictions are uncertain by {error_tokens:,.0f}"
    if reason is not None:
        return Comparison(None, round(error_tokens), f"cannot compare: {reason}")
    return Comparison(round(other_tokens), round(error_tokens), None)
