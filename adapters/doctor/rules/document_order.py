"""Documents in another order than in an earlier request."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from ragorder.adapters.doctor.beginnings import repeated_parts
from ragorder.adapters.doctor.case import Case, graded
from ragorder.adapters.doctor.finding import Finding
from ragorder.orderer import Orderer

__all__ = ["check"]

_CHECK = "order of documents"


def check(case: Case) -> Finding:
    """Count requests whose first difference from all earlier ones is a document that others have, with more such
    documents after it: another order could have reused more."""
    reordered = sum(each.at_repeated for each in case.partings)
    found = f"{reordered:,} of {len(case.beginnings):,} requests have documents of earlier ones in another order"
    if graded(reordered, len(case.beginnings)) == "good":
        return Finding(_CHECK, "good", found)
    plain, ordered = (100 * share for share in _reusable(case))
    advice = (
        "order them with ragorder. With each repeated line as a document and an unlimited cache, "
        f"about {ordered:.0f} % of the prompt tokens could be reused, {plain:.0f} % in the log's order; "
        "`ragorder replay LOG`, of a log with the ids of the documents, shows it by size of the cache"
    )
    return Finding(_CHECK, "warning", found, advice)


def _reusable(case: Case) -> tuple[float, float]:
    lengths: dict[str, Any] = {"key": itemgetter(0), "tokens": lambda part: case.tokens(part[1])}
    block_size = case.block_size or 16
    orderers = [
        Orderer(capacity_tokens=None, block_size=block_size, moves="prefix", max_displacement=0, **lengths),
        Orderer(capacity_tokens=None, block_size=block_size, **lengths),
    ]
    reused = [0, 0]
    for request, parts in zip(case.log.requests, repeated_parts(case.log.requests), strict=True):
        for place, orderer in enumerate(orderers):
            ordering = orderer.order([*parts.items()], scope=request.scope)
            reused[place] += ordering.cached_tokens
            ordering.confirm()
    tokens = max(1, sum(map(case.length, case.log.requests)))
    return min(1.0, reused[0] / tokens), min(1.0, reused[1] / tokens)
