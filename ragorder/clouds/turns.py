"""Messages with cache breakpoints for the APIs of clouds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from ragorder.clouds.parts import Part, cache_control, cache_options, cache_point, prompt_cache_breakpoint

_INSTRUCTIONS = ("system", "developer")
_SPEAKERS = ("user", "assistant")


class HistoryMark(NamedTuple):
    """A breakpoint after `parts` of the `of` parts of message number `message`."""

    message: int
    parts: int
    of: int


class TurnMarks(NamedTuple):
    """A turn's breakpoints: after the system prompt, in history messages, after documents and question."""

    system: bool = False
    history: tuple[HistoryMark, ...] = ()
    documents: tuple[int, ...] = ()
    question: bool = False

    @classmethod
    def of(cls, places: Sequence[int], sizes: Sequence[int], documents: int) -> TurnMarks:
        """Return the breakpoints at `places` (nodes before each); the history's messages have `sizes` nodes."""
        ends = list(accumulate(sizes))
        start = ends[-1] if ends else 0
        history = []
        for place in places:
            if 0 < place <= start:
                message = next(number for number, end in enumerate(ends) if place <= end)
                history.append(HistoryMark(message, place - ends[message] + sizes[message], sizes[message]))
        own = tuple(place - start for place in places if start < place <= start + documents)
        return cls(0 in places, tuple(history), own, any(place > start + documents for place in places))


@dataclass(slots=True, eq=False)
class TurnParts:
    """A turn's messages and breakpoints; the first `front` messages are the system prompt.

        TurnParts(messages, 1, TurnMarks(system=True, question=True), "5m").anthropic()

    Messages that are not texts are sent unchanged.
    """

    messages: Sequence[Mapping[str, Any]]
    front: int
    marks: TurnMarks
    ttl: str | None = None
    explicit: bool = False

    def anthropic(self) -> dict[str, Any]:
        """Return arguments of `client.messages.create`. Raises ValueError for messages that have another form there."""
        mark = cache_control(self.ttl)
        return self._split(lambda content, places: _marked(content, places, partial(_with_mark, mark, False)), mark)

    def bedrock(self) -> dict[str, Any]:
        """Return arguments of Bedrock's `converse`. Raises as `anthropic` does."""
        point = cache_point(self.ttl)

        def converse(content: Any, places: Sequence[int]) -> list[Part]:
            parts = _marked(content, places, lambda part: [part, point])
            return [{"text": part["text"]} if part.get("type") == "text" else part for part in parts]

        return self._split(converse)

    def contents(self, mark: Part, *, apart: bool = False) -> list[Any]:
        contents: list[Any] = []
        for number, message in enumerate(self.messages):
            content, places = message.get("content"), self._places(number, mark)
            contents.append(_marked(content, places, partial(_with_mark, mark, apart)) if places else content)
        return contents

    def openai(self) -> dict[str, Any]:
        messages = []
        contents = self.contents(prompt_cache_breakpoint())
        for message, content in zip(self.messages, contents, strict=True):
            messages.append({**message, "content": content} if "content" in message else dict(message))
        return {"messages": messages} | (cache_options(self.ttl) if self.explicit else {})

    def _split(self, convert: Callable[[Any, Sequence[int]], Any], mark: Part | None = None) -> dict[str, Any]:
        found: dict[str, Any] = {"messages": []}
        for number, message in enumerate(self.messages):
            role, content, places = message.get("role"), message.get("content"), self._places(number, mark)
            if role in _INSTRUCTIONS and number < self.front:
                found["system"] = convert(content, places)
            elif role in _SPEAKERS and not message.get("tool_calls"):
                found["messages"].append({"role": role, "content": convert(content, places)})
            else:
                raise ValueError(
                    f"messages[{number}]: a message of a tool, a call of one or another system prompt has another form "
                    "in this API: write such messages yourself, with the breakpoints of ordering.cloud.turn_marks"
                )
        return found

    def _places(self, number: int, mark: Part | None) -> list[int]:
        """Omit breakpoints that the application's own make wrong: Anthropic refuses an hour's after five minutes'."""
        places = self._chosen(number)
        # Few messages have breakpoints, and only these look through all others.
        if not places or mark is None or "cache_control" not in mark:
            return places
        is_hour = _is_hour(mark)
        own = [
            ((message, place), _is_hour(part))
            for message, each in enumerate(self.messages)
            for place, part in enumerate(_parts(each.get("content")), 1)
            if part.get("cache_control")
        ]
        return [
            place
            for place in places
            if not any(
                other == (number, place) or (hour != is_hour and (other < (number, place)) == is_hour)
                for other, hour in own
            )
        ]

    def _chosen(self, number: int) -> list[int]:
        marks, content = self.marks, self.messages[number].get("content")
        if not content:  # a call of a tool; an empty text with a breakpoint is refused
            return []
        count = len(content) if isinstance(content, list) else 1
        last = len(self.messages) - 1
        if number < self.front:
            return [count] if marks.system and number == self.front - 1 else []
        if number == last:
            # A document that is no text has no part of its own, so its breakpoints would be at another place.
            own = [place for place in marks.documents if place < count]
            return own + [count] * marks.question
        places = set()
        for mark in marks.history:
            if mark.message == number - self.front:
                if mark.parts == mark.of:
                    places.add(count)
                elif mark.of == count:
                    places.add(mark.parts)
        return sorted(places)


def _parts(content: Any) -> list[Mapping[str, Any]]:
    return [part if isinstance(part, Mapping) else {} for part in content] if isinstance(content, list) else []


def _is_hour(part: Mapping[str, Any]) -> bool:
    control = part["cache_control"]
    return isinstance(control, Mapping) and control.get("ttl") == "1h"


def _with_mark(mark: Part, apart: bool, part: Part) -> list[Part]:
    return [part, dict(mark)] if apart else [{**part, **mark}]


def _marked(content: Any, places: Sequence[int], mark: Callable[[Part], list[Part]]) -> list[Part]:
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    found: list[Part] = []
    for number, part in enumerate(parts, 1):
        found += mark(dict(part)) if number in places else [dict(part)]
    return found
