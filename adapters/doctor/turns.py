"""Later turns of conversations, and the turns before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragorder.adapters.doctor.request_log import LoggedRequest, Message

__all__ = ["Turn", "later_turns"]

_ASKS = ("user", "tool")
# Applications store the bare question, and send it after or before retrieved text.
_ENDS = (64, 32, 16)
_LEAST = 16


@dataclass(frozen=True, slots=True)
class Turn:
    before: LoggedRequest
    request: LoggedRequest

    @property
    def changed(self) -> int | None:
        """Index of the first message of `before` that was changed or dropped, or None."""
        pairs = zip(self.before.messages, self.request.messages, strict=False)
        changed = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
        if changed is None and len(self.request.messages) < len(self.before.messages):
            return len(self.request.messages)
        return changed


def later_turns(requests: Sequence[LoggedRequest]) -> list[Turn]:
    """Return requests whose turn before is in the log: the request with the same messages before the last answer, or
    else the last one whose question contains, or is part of, the question before that answer."""
    sent: dict[tuple[tuple[str, str], tuple[Message, ...]], LoggedRequest] = {}
    asked: dict[tuple[tuple[str, str], str], LoggedRequest] = {}
    found = []
    for request in requests:
        answers = [place for place, each in enumerate(request.messages) if each.role == "assistant"]
        if answers:
            earlier = request.messages[: answers[-1]]
            before = sent.get((request.scope, earlier)) or _by_question(request, _question(earlier), asked)
            if before is not None:
                found.append(Turn(before, request))
        sent[request.scope, request.messages] = request
        asked.update({(request.scope, key): request for key in _keys(_question(request.messages))})
    return found


def _by_question(
    request: LoggedRequest, question: str, asked: dict[tuple[tuple[str, str], str], LoggedRequest]
) -> LoggedRequest | None:
    candidates = (asked.get((request.scope, key)) for key in _keys(question))
    return next((each for each in candidates if each is not None and _is_asked(question, each)), None)


def _is_asked(question: str, before: LoggedRequest) -> bool:
    theirs = _question(before.messages)
    return question in theirs or theirs in question


def _question(messages: Sequence[Message]) -> str:
    return next((each.text.strip() for each in reversed(messages) if each.role in _ASKS), "")


def _keys(question: str) -> Iterator[str]:
    if len(question) < _LEAST:
        return
    yield question
    for length in _ENDS:
        if len(question) >= length:
            yield f"…{question[-length:]}"
            yield f"{question[:length]}…"
