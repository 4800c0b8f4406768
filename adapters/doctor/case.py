"""Input and results of the rules on a request log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from ragorder.adapters.doctor.beginnings import Parting, SharedBeginning, find_partings, shared_beginnings
from ragorder.adapters.doctor.front import ListChange, ToolsChange, list_changes, tool_changes
from ragorder.adapters.doctor.request_log import LoggedRequest, RequestLog
from ragorder.adapters.doctor.turns import Turn, later_turns
from ragorder.adapters.http_client import Server, ServerError
from ragorder.errors import RagorderError

Verdict = Literal["good", "warning", "bad", "unknown"]
Chat = Sequence[Mapping[str, Any]]
_CLOCK = "strftime_now"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of a check."""

    check: str
    verdict: Verdict
    found: str
    advice: str | None = None


class RenderError(RagorderError):
    """The message does not quote the chat."""


def tokenized(server: Server, model: str | None, **prompt: Any) -> list[Any]:
    """Raises RenderError."""
    try:
        answer = server.post_json("/tokenize", prompt | ({} if model is None else {"model": model}))
    except ServerError as error:
        raise RenderError(str(error)) from None
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(tokens, list):
        raise RenderError(f"{server.root}/tokenize returned no tokens: give --tokenizer")
    return tokens


@dataclass(frozen=True, slots=True)
class ServerTemplate:
    """`dated`: whether the chat template writes today's date."""

    server: Server
    model: str | None
    dated: ClassVar[bool] = False

    def render(self, messages: Chat, *, open_end: bool) -> Sequence[Any]:
        """Return a chat's tokens, with `open_end` up to the start of the answer. Raises RenderError."""
        return tokenized(self.server, self.model, messages=list(messages), add_generation_prompt=open_end)


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


ChatTemplate = ServerTemplate | LocalTemplate


@dataclass
class Case:
    log: RequestLog
    block_size: int | None = None
    template: ChatTemplate | None = None
    topic_header: str | None = None
    probe: Callable[[], Sequence[int | None]] | None = None

    @cached_property
    def cached_share(self) -> float:
        """Reported share of cached prompt tokens; without reports, the share that begins an earlier request."""
        known = [each for each in self.log.requests if each.cached_tokens is not None and each.prompt_tokens]
        if not known:
            return self.reusable(self.log.requests)
        return sum(each.cached_tokens or 0 for each in known) / sum(each.prompt_tokens or 0 for each in known)

    def reusable(self, requests: Sequence[LoggedRequest]) -> float:
        """Return the share of tokens that begin an earlier request of the same scope."""
        shared = sum(min(self.tokens(each.characters), self.length(request)) for request, each in _with(requests))
        return min(1.0, shared / max(1, sum(map(self.length, requests))))

    def instead(self, requests: Sequence[LoggedRequest], how: str) -> str:
        """Compare the cached share with that of these requests."""
        cached, would = 100 * self.cached_share, 100 * self.reusable(requests)
        return f"{cached:.1f} % of the prompt tokens were cached, about {max(cached, would):.0f} % would be {how}"

    @cached_property
    def beginnings(self) -> list[tuple[LoggedRequest, SharedBeginning]]:
        return [(each, found) for each, found in _with(self.log.requests) if found.earlier]

    @cached_property
    def other_tools(self) -> Mapping[int, ToolsChange]:
        return tool_changes(self.log.requests)

    @cached_property
    def other_lists(self) -> Mapping[int, ListChange]:
        return list_changes(self.log.requests)

    @cached_property
    def partings(self) -> list[Parting]:
        """Those caused neither by tools' order or set nor by a list's order in the system message."""
        return [
            each
            for each in find_partings(self.log.requests, self.beginnings, self.tokens)
            if not (each.at < each.request.tools_end and self.other_tools.get(each.request.line) in ("order", "names"))
            and self.other_lists.get(each.request.line) != "order"
        ]

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


def _with(requests: Sequence[LoggedRequest]) -> Iterable[tuple[LoggedRequest, SharedBeginning]]:
    return zip(requests, shared_beginnings(requests), strict=True)


def graded(part: int, whole: int, *, bad: float = 0.5, warning: float = 0.1) -> Verdict:
    if not whole or part < warning * whole:
        return "good"
    return "bad" if part >= bad * whole else "warning"


def counted(kinds: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} ({count:,})" for name, count in sorted(kinds.items(), key=lambda each: (-each[1], each[0]))
    )
