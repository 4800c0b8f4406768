"""Input of the rules, from a request log and a server, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, Protocol

from ragorder.adapters.doctor.request_log import LoggedRequest, Message, RequestLog
from ragorder.adapters.http_client import Server, ServerError
from ragorder.errors import RagorderError

__all__ = [
    "Case",
    "ChatTemplate",
    "Finding",
    "LocalTemplate",
    "Parting",
    "RenderError",
    "ServerTemplate",
    "SharedBeginning",
    "Turn",
    "Verdict",
    "common_length",
    "counted",
    "find_partings",
    "graded",
    "later_turns",
    "repeated_parts",
    "shared_beginnings",
]

Verdict = Literal["good", "warning", "bad", "unknown"]
Chat = Sequence[Mapping[str, Any]]
_CLOCK = "strftime_now"
_CHUNK = 256
# The first chunks are shorter, for requests that differ early.
_FIRST = (16, 32, 64, 128, 256)
_LONG_LINE = 40
_LEAST_TOKENS = 32
_ASKS = ("user", "tool")
# Applications store the bare question, and send it after or before retrieved text.
_ENDS = (64, 32, 16)
_LEAST = 16


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check; `advice` says what to change."""

    check: str
    verdict: Verdict
    found: str
    advice: str | None = None


class RenderError(RagorderError):
    """The chat template fails. The message does not quote the chat."""


class ChatTemplate(Protocol):
    dated: bool
    """Whether it writes today's date."""

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        """Return a chat's tokens, with `open_end` up to the start of the answer. Raises RenderError."""


class ServerTemplate:
    dated = False

    def __init__(self, server: Server, model: str | None) -> None:
        self._server = server
        self._model = {} if model is None else {"model": model}

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        body = {"messages": list(messages), "add_generation_prompt": open_end, **self._model}
        try:
            answer = self._server.post_json("/tokenize", body)
        except ServerError as error:
            raise RenderError(str(error)) from None
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list):
            raise RenderError(f"{self._server.root}/tokenize returned no tokens: give --tokenizer")
        return tokens


class LocalTemplate:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.dated = _CLOCK in str(getattr(tokenizer, "chat_template", None) or "")

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=open_end)
            tokens: Sequence[Any] = self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            # A template may raise anything, and the error may quote a message.
            raise RenderError(f"the chat template fails on it ({type(error).__name__})") from None
        return tokens


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """Length of the prefix shared with `earlier` (None for the first request of a scope)."""

    characters: int
    earlier: LoggedRequest | None


@dataclass(frozen=True, slots=True)
class Parting:
    """First difference of a request from all earlier ones, before text that others repeat. `at_repeated`: in a repeated
    line, so that only the order of documents differs."""

    request: LoggedRequest
    at: int
    earlier: LoggedRequest | None
    at_repeated: bool


def find_partings(
    requests: Sequence[LoggedRequest],
    beginnings: Iterable[tuple[LoggedRequest, SharedBeginning]],
    tokens: Callable[[int], int],
) -> list[Parting]:
    repeats = _repeated_lines(requests)
    found = []
    for request, shared in beginnings:
        at = shared.characters
        later = [line for start, line in _lines(request.text) if start > at and len(line) >= _LONG_LINE]
        if tokens(sum(len(each) for each in later if _key(request, each) in repeats)) >= _LEAST_TOKENS:
            at_repeated = _key(request, _line_at(request.text, at)) in repeats
            found.append(Parting(request, at, shared.earlier, at_repeated))
    return found


def shared_beginnings(requests: Sequence[LoggedRequest]) -> list[SharedBeginning]:
    """Return for each request the earlier one of its scope with the longest common prefix, to within 256 characters."""
    by_chunks: dict[tuple[tuple[str, str], bytes], LoggedRequest] = {}
    last: dict[tuple[str, str], LoggedRequest] = {}
    found = []
    for request in requests:
        nearest, known = last.get(request.scope), True
        for digest in _digests(request.text):
            key = (request.scope, digest)
            if known and (known := key in by_chunks):
                nearest = by_chunks[key]
            by_chunks[key] = request
        last[request.scope] = request
        shared = 0 if nearest is None else common_length(request.text, nearest.text)
        found.append(SharedBeginning(shared, nearest))
    return found


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    least, most = 0, min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    while most - least > 1:
        middle = (least + most) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle
    return least


def _digests(text: str) -> list[bytes]:
    digest, start, found = blake2b(digest_size=16), 0, []
    ends = [*_FIRST, *range(_FIRST[-1] + _CHUNK, len(text) + 1, _CHUNK)]
    for end in ends:
        if end > len(text):
            break
        digest.update(text[start:end].encode("utf-8", "surrogatepass"))
        found.append(digest.copy().digest())
        start = end
    return found


def repeated_parts(requests: Sequence[LoggedRequest]) -> list[dict[bytes, int]]:
    repeats = _repeated_lines(requests)
    return [
        {
            key: len(line)
            for _, line in _lines(request.text)
            if len(line) >= _LONG_LINE and (key := _key(request, line)) in repeats
        }
        for request in requests
    ]


def _repeated_lines(requests: Sequence[LoggedRequest]) -> set[bytes]:
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
    start = 0
    for line in text.split("\n"):
        if line.strip():
            yield start, line
        start += len(line) + 1


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


@dataclass
class Case:
    """Input of the rules. `probe` sends one prompt several times with the same topic in `topic_header`, and returns
    each repetition's cached tokens."""

    log: RequestLog
    block_size: int | None = None
    template: ChatTemplate | None = None
    topic_header: str | None = None
    probe: Callable[[], Sequence[int | None]] | None = None

    @cached_property
    def beginnings(self) -> list[tuple[LoggedRequest, SharedBeginning]]:
        shared = shared_beginnings(self.log.requests)
        return [(each, found) for each, found in zip(self.log.requests, shared, strict=True) if found.earlier]

    @cached_property
    def partings(self) -> list[Parting]:
        return find_partings(self.log.requests, self.beginnings, self.tokens)

    @cached_property
    def turns(self) -> list[Turn]:
        return later_turns(self.log.requests)

    def tokens(self, characters: float) -> int:
        return round(characters * self._tokens_per_character)

    @cached_property
    def _tokens_per_character(self) -> float:
        return self.log.tokens_per_character()

    def length(self, request: LoggedRequest) -> int:
        return request.prompt_tokens or self.tokens(len(request.text))


def graded(part: int, whole: int, *, bad: float = 0.5, warning: float = 0.1) -> Verdict:
    if not whole or part < warning * whole:
        return "good"
    return "bad" if part >= bad * whole else "warning"


def counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} ({count:,})" for name, count in sorted(kinds.items(), key=lambda each: (-each[1], each[0]))
    )
