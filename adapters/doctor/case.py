"""Request log and server data for the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ragorder.adapters.doctor.beginnings import Parting, SharedBeginning, find_partings, shared_beginnings
from ragorder.adapters.doctor.chat_template import ChatTemplate
from ragorder.adapters.doctor.finding import Verdict
from ragorder.adapters.doctor.request_log import LoggedRequest, RequestLog
from ragorder.adapters.doctor.turns import Turn, later_turns

__all__ = ["Case", "counted", "graded"]


@dataclass
class Case:
    """Input of the rules. `block_size` is in tokens; `template` renders chats as the engine does. `probe` sends one
    prompt several times with the same topic in `topic_header`, and returns each repetition's cached tokens."""

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
