"""Later turns of conversations, and the turns before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragorder.adapters.doctor.request_log import LoggedRequest

__all__ = ["Turn", "later_turns"]

_ASKS = ("user", "tool")
# Applications store the bare question, and send it among retrieved text: one end of the message is the same.
_END = 40
_LEAST = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """A request and the one that it continues."""

    before: LoggedRequest
    request: LoggedRequest

    @property
    def changed(self) -> int | None:
        """The number of the first message of the turn before that is not sent again as it was; None: all are."""
        pairs = zip(self.before.messages, self.request.messages, strict=False)
        changed = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
        if changed is None and len(self.request.messages) < len(self.before.messages):
            return len(self.request.messages)
        return changed


def later_turns(requests: Sequence[LoggedRequest]) -> list[Turn]:
    """Requests with answers in them, of which the log has the turn before: it has one answer less, and its last
    question is, or contains, the one that stands in front of the last answer."""
    asked: dict[tuple[tuple[str, str], int, str], LoggedRequest] = {}
    found = []
    for request in requests:
        answers = [place for place, each in enumerate(request.messages) if each.role == "assistant"]
        if answers and (question := _question(request, answers[-1])):
            keys = ((request.scope, len(answers) - 1, key) for key in _keys(question))
            before = next((asked[key] for key in keys if key in asked), None)
            if before is not None and _asked(before, question):
                found.append(Turn(before, request))
        if question := _question(request, len(request.messages)):
            asked.update({(request.scope, len(answers), key): request for key in _keys(question)})
    return found


def _question(request: LoggedRequest, end: int) -> str:
    """The last question in front of a message."""
    asks = (each.text.strip() for each in reversed(request.messages[:end]) if each.role in _ASKS)
    return next(asks, "")


def _asked(before: LoggedRequest, question: str) -> bool:
    theirs = _question(before, len(before.messages))
    return len(question) >= _LEAST and (question in theirs or theirs in question)


def _keys(question: str) -> Iterator[str]:
    yield question
    yield f"…{question[-_END:]}"
    yield f"{question[:_END]}…"
