"""Text in front of the documents that differs from request to request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

from ragorder.adapters.doctor.case import Case, counted, graded
from ragorder.adapters.doctor.finding import Finding
from ragorder.adapters.doctor.prompts import recognise

__all__ = ["check"]

_CHECK = "text before the documents"
_LONG_LINE = 40
_LEAST_TOKENS = 32
_NEW_TEXT = "other text that is new in each request"
_ADVICE = (
    "put what all requests have in common first, the same to the letter, then the documents, and behind them what "
    "varies"
)


def check(case: Case) -> Finding:
    """Requests that repeat long lines of earlier ones, but part from all of them before those lines, at something that
    is neither such a line itself: then only the order of the documents differs, which ragorder is for."""
    known: dict[tuple[str, str], set[bytes]] = {}
    shared = {id(each): found for each, found in case.beginnings}
    kinds: Counter[str] = Counter()
    remedies: Counter[str] = Counter()
    repeating = reordered = in_system = 0
    for request in case.log.requests:
        seen = known.setdefault(request.scope, set())
        found = shared.get(id(request))
        if found is not None and found.earlier is not None:
            at = found.characters
            repeated = [start for start, line in _lines(request.text) if start > at and line in seen]
            if case.tokens(sum(_LONG_LINE for _ in repeated)) >= _LEAST_TOKENS:
                repeating += 1
                kind, remedy = _difference(request.text, found.earlier.text, at)
                if not kind and _begins_a_document(request.text, at, seen):
                    reordered += 1
                else:
                    kinds[kind or _NEW_TEXT] += 1
                    remedies[remedy or _ADVICE] += 1
                    in_system += at < request.system_end
        seen.update(line for _, line in _lines(request.text))
    said = f"of {repeating:,} requests that repeat text of earlier ones, "
    if not repeating:
        return Finding(_CHECK, "good", "no request repeats text of an earlier one behind the place where they part")
    parted = sum(kinds.values())
    verdict = graded(parted, repeating)
    if verdict == "good":
        also = f", {reordered:,} have the same documents in another order" if reordered else ""
        return Finding(_CHECK, "good", f"{said}{parted:,} part from them in front of it{also}")
    found_text = f"{said}{parted:,} part from them in front of it"
    found_text += f", {in_system:,} in the system message" if in_system else ""
    advice = "; ".join(remedy for remedy, _ in remedies.most_common(2))
    return Finding(_CHECK, verdict, f"{found_text}: {counted(kinds)}", advice)


def _difference(text: str, other: str, at: int) -> tuple[str, str]:
    kind, remedy = recognise(text, at)
    return (kind, remedy) if kind else recognise(other, at)


def _begins_a_document(text: str, at: int, seen: set[bytes]) -> bool:
    """Whether what stands there was in an earlier request, from this line or the next one on."""
    start = text.rfind("\n", 0, at) + 1
    following = [(place, line) for place, line in _lines(text) if place >= start][:2]
    return any(line in seen for _, line in following)


def _lines(text: str) -> Iterator[tuple[int, bytes]]:
    """Long lines, as digests, and where they begin."""
    start = 0
    for line in text.split("\n"):
        if len(line) >= _LONG_LINE:
            yield start, blake2b(line.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        start += len(line) + 1
