"""Text in front of the documents that differs from request to request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from hashlib import blake2b

from ragorder.adapters.doctor.case import Case, counted, graded
from ragorder.adapters.doctor.finding import Finding
from ragorder.adapters.doctor.prompts import recognise
from ragorder.adapters.doctor.request_log import LoggedRequest

__all__ = ["check"]

_CHECK = "text before the documents"
_LONG_LINE = 40
_LEAST_TOKENS = 32
_NEARLY_ALL = 0.9
_NEW_TEXT = "text that no other request has"
_ADVICE = (
    "put what all requests have in common first, the same to the letter, then the documents, and behind them what "
    "varies"
)


def check(case: Case) -> Finding:
    """Of requests that repeat long lines of others, those that part from all earlier ones before these lines, in a line
    that is not repeated itself. If it is, only the order of the documents differs, which ragorder is for."""
    repeats = _repeated_lines(case.log.requests)
    kinds: Counter[str] = Counter()
    remedies: Counter[str] = Counter()
    repeating = reordered = in_system = 0
    for request, shared in case.beginnings:
        at = shared.characters
        behind = [line for start, line in _lines(request.text) if start > at and len(line) >= _LONG_LINE]
        if case.tokens(sum(len(each) for each in behind if _key(request, each) in repeats)) < _LEAST_TOKENS:
            continue
        repeating += 1
        if _key(request, _line_at(request.text, at)) in repeats:
            reordered += 1
            continue
        other = shared.earlier.text if shared.earlier else ""
        known = (recognise(text, at) for text in (request.text, other))
        kind, remedy = next((each for each in known if each[0]), ("", ""))
        kinds[kind or _NEW_TEXT] += 1
        remedies[remedy or _ADVICE] += 1
        in_system += at < request.system_end
    if not repeating:
        return Finding(_CHECK, "good", "no request repeats text of another one behind the place where they part")
    if kinds[_NEW_TEXT] < _NEARLY_ALL * repeating:
        # A document that only one request has is new text, too; but then not all have one in front.
        reordered += kinds.pop(_NEW_TEXT, 0)
        remedies.pop(_ADVICE, None)
    parted = kinds.total()
    found = f"of {repeating:,} requests that repeat text of others, {parted:,} part from them in front of it"
    verdict = graded(parted, repeating)
    if verdict == "good":
        also = f", and {reordered:,} have their documents in another order" if reordered else ""
        return Finding(_CHECK, "good", found + also)
    found += f", {in_system:,} in the system message" if in_system else ""
    advice = "; ".join(remedy for remedy, _ in remedies.most_common(2))
    return Finding(_CHECK, verdict, f"{found}: {counted(kinds)}", advice)


def _repeated_lines(requests: tuple[LoggedRequest, ...]) -> set[bytes]:
    """Lines that at least two requests of a scope have."""
    once: set[bytes] = set()
    repeated: set[bytes] = set()
    for request in requests:
        keys = {_key(request, line) for _, line in _lines(request.text)}
        repeated |= keys & once
        once |= keys
    return repeated


def _key(request: LoggedRequest, line: str) -> bytes:
    text = "\0".join((*request.scope, line.strip()))
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=12).digest()


def _line_at(text: str, at: int) -> str:
    end = text.find("\n", at)
    return text[text.rfind("\n", 0, at) + 1 : end if end >= 0 else len(text)]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with text in them, and where they begin."""
    start = 0
    for line in text.split("\n"):
        if line.strip():
            yield start, line
        start += len(line) + 1
