"""Changing text before the documents."""

from __future__ import annotations

from collections import Counter

from ragorder.adapters.doctor.case import Case, counted, graded
from ragorder.adapters.doctor.finding import Finding
from ragorder.adapters.doctor.prompts import recognise

__all__ = ["check"]

_CHECK = "text before the documents"
_NEARLY_ALL = 0.9
_NEW_TEXT = "text that no other request has"
_ADVICE = "put shared text first, byte for byte the same in all requests, then the documents, then varying text"


def check(case: Case) -> Finding:
    """Count requests whose first difference from all earlier ones is an unrepeated line, before long lines that others
    repeat. In a repeated line only the order of documents differs: another rule."""
    kinds: Counter[str] = Counter()
    remedies: Counter[str] = Counter()
    in_system = 0
    for each in case.partings:
        if each.at_repeated:
            continue
        other = each.earlier.text if each.earlier else ""
        known = (recognise(text, each.at) for text in (each.request.text, other))
        kind, remedy = next((found for found in known if found[0]), ("", ""))
        kinds[kind or _NEW_TEXT] += 1
        remedies[remedy or _ADVICE] += 1
        in_system += each.at < each.request.system_end
    repeating = len(case.partings)
    if not repeating:
        return Finding(_CHECK, "good", "no request repeats text of another one after their first difference")
    if kinds[_NEW_TEXT] < _NEARLY_ALL * repeating:
        # A document that only one request has is new text, too; but then some requests have none before the difference.
        kinds.pop(_NEW_TEXT, None)
        remedies.pop(_ADVICE, None)
    parted = kinds.total()
    found = f"of {repeating:,} requests that repeat text of others, {parted:,} differ from them before it"
    verdict = graded(parted, repeating)
    if verdict == "good":
        return Finding(_CHECK, "good", found)
    found += f", {in_system:,} in the system message" if in_system else ""
    advice = "; ".join(remedy for remedy, _ in remedies.most_common(2))
    return Finding(_CHECK, verdict, f"{found}: {counted(kinds)}", advice)
