"""Documents that stand in another order than in an earlier request."""

from __future__ import annotations

from ragorder.adapters.doctor.case import Case, graded
from ragorder.adapters.doctor.finding import Finding

__all__ = ["check"]

_CHECK = "order of documents"
_ADVICE = (
    "order them: that is what ragorder is for; `ragorder replay LOG`, of a log with the ids of the documents, shows by "
    "how much more is cached"
)


def check(case: Case) -> Finding:
    """Requests that part from all earlier ones at a document that others have, too, and have more of these after it: a
    cache could have reused more in another order."""
    reordered = sum(each.at_repeated for each in case.partings)
    found = f"{reordered:,} of {len(case.beginnings):,} requests have documents of earlier ones in another order"
    if graded(reordered, len(case.beginnings)) == "good":
        return Finding(_CHECK, "good", found)
    return Finding(_CHECK, "warning", found, _ADVICE)
