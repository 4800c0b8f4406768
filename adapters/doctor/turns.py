"""Requests of a log that continue earlier ones."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ragorder.adapters.doctor.request_log import LoggedRequest, Message

_ASKS = ("user", "tool")
# Applications store the bare question, and send it after or before retrieved text.
_ENDS = (64, 32, 16)
# A shorter question may stand in a prompt by chance: it is looked for at the beginnings and ends of lines and marks.
_LONG = 16
_SHORTEST = 2
_BEGINS = re.compile(r"(?:^|[\n>\])}]|[:：][ \t]?)[ \t]*(?=\S)")
_ENDS_OF_LINES = re.compile(r"[ \t]*(?=\n|<|$)")
_NEAR = 6
_REACH = 200


@dataclass(frozen=True, slots=True)
class Turn:
    before: LoggedRequest
    request: LoggedRequest

    @property
    def changed(self) -> int | None:
        """First message of `before` that was changed or dropped, or None."""
        pairs = zip(self.before.messages, self.request.messages, strict=False)
        changed = next((place for place, (old, new) in enumerate(pairs) if old != new), None)
        if changed is None and len(self.request.messages) < len(self.before.messages):
            return len(self.request.messages)
        return changed


def later_turns(requests: Sequence[LoggedRequest]) -> list[Turn]:
    """Find requests whose turn before is in the log: one with the same messages before the last answer, else the last
    whose question contains, or is part of, the one before the answer. A short question must follow the same answer, or
    be asked once."""
    sent: dict[tuple[tuple[str, str], tuple[Message, ...]], LoggedRequest] = {}
    asked = _Asked(requests)
    found = []
    for request in requests:
        answers = [place for place, each in enumerate(request.messages) if each.role == "assistant"]
        if answers:
            earlier = request.messages[: answers[-1]]
            before = sent.get((request.scope, earlier)) or asked.find(request, earlier)
            if before is not None:
                found.append(Turn(before, request))
        sent[request.scope, request.messages] = request
        asked.add(request)
    return found


_Key = tuple[tuple[str, str], str, str]


class _Asked:
    def __init__(self, requests: Sequence[LoggedRequest]) -> None:
        self._long: dict[tuple[tuple[str, str], str], LoggedRequest] = {}
        self._short: dict[_Key, LoggedRequest] = {}
        asking: defaultdict[_Key, set[tuple[Message, ...]]] = defaultdict(set)
        for request in requests:
            for key in _short_keys(request):
                asking[key].add(request.messages)
        self._ambiguous = {key for key, each in asking.items() if len(each) > 1 and len(key[1]) < _LONG}

    def add(self, request: LoggedRequest) -> None:
        self._long.update({(request.scope, key): request for key in _keys(_question(request.messages))})
        self._short.update(dict.fromkeys(_short_keys(request), request))

    def find(self, request: LoggedRequest, earlier: Sequence[Message]) -> LoggedRequest | None:
        question = _question(earlier)
        if len(question) < _LONG:
            key = (request.scope, _last_answer(earlier), question)
            return None if key in self._ambiguous else self._short.get(key)
        for piece in _keys(question):
            before = self._long.get((request.scope, piece))
            if before is not None and (question in (theirs := _question(before.messages)) or theirs in question):
                return before
        return None


def _short_keys(request: LoggedRequest) -> list[_Key]:
    answer = _last_answer(request.messages)
    return [(request.scope, answer, piece) for piece in _pieces(_question(request.messages))]


def _question(messages: Sequence[Message]) -> str:
    return next((each.text.strip() for each in reversed(messages) if each.role in _ASKS), "")


def _last_answer(messages: Sequence[Message]) -> str:
    return next((each.text[-_REACH:] for each in reversed(messages) if each.role == "assistant"), "")


def _keys(question: str) -> Iterator[str]:
    if len(question) < _LONG:
        return
    yield question
    for length in _ENDS:
        if len(question) >= length:
            yield f"…{question[-length:]}"
            yield f"{question[:length]}…"


def _pieces(question: str) -> set[str]:
    """Return short texts that may be the question: first and last lines, or their ends."""
    found = {question}
    for part in (question[:_REACH], question[-_REACH:]):
        starts = [match.end() for match in _BEGINS.finditer(part)]
        for start in (*starts[:_NEAR], *starts[-_NEAR:]):
            end = _ENDS_OF_LINES.search(part, start)
            found |= {part[start:].strip(), part[start : end.start() if end else None].strip()}
    return {each for each in found if _SHORTEST <= len(each) < _LONG}
