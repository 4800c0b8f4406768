"""Content parts with cache breakpoints for the APIs of clouds.

A mark is the number of texts before a breakpoint. Empty texts are omitted: the APIs refuse them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Part = dict[str, Any]


def cache_control(ttl: str | None = None) -> Part:
    return {"cache_control": {"type": "ephemeral"} if ttl is None else {"type": "ephemeral", "ttl": ttl}}


def prompt_cache_breakpoint() -> Part:
    return {"prompt_cache_breakpoint": {"mode": "explicit"}}


def cache_options(ttl: str | None = None) -> Part:
    """Return the field of an OpenAI body by which only the breakpoints of its parts count."""
    options = {"mode": "explicit"} if ttl is None else {"mode": "explicit", "ttl": ttl}
    return {"prompt_cache_options": options}


def cache_point(ttl: str | None = None) -> Part:
    # The default TTL is left out: earlier versions of boto3 do not have the field.
    return {"cachePoint": {"type": "default"} if ttl in (None, "5m") else {"type": "default", "ttl": ttl}}


def anthropic_content(texts: Sequence[str], marks: Sequence[int] = (), ttl: str | None = None) -> list[Part]:
    """Return parts for `messages[…].content` or `system` of the Messages API."""
    return [
        {"type": "text", "text": text} | (cache_control(ttl) if marked else {})
        for text, marked in _marked(texts, marks)
    ]


def openai_content(texts: Sequence[str], marks: Sequence[int] = (), type: str = "text") -> list[Part]:
    """Return parts for `messages[…].content` of Chat Completions, or with `type="input_text"` of Responses."""
    return [
        {"type": type, "text": text} | (prompt_cache_breakpoint() if marked else {})
        for text, marked in _marked(texts, marks)
    ]


def bedrock_content(texts: Sequence[str], marks: Sequence[int] = (), ttl: str | None = None) -> list[Part]:
    """Return parts for `messages[…].content` or `system` of Converse, with breakpoints as separate parts."""
    parts: list[Part] = []
    for text, marked in _marked(texts, marks):
        parts.append({"text": text})
        if marked:
            parts.append(cache_point(ttl))
    return parts


def _marked(texts: Sequence[str], marks: Sequence[int]) -> Iterator[tuple[str, bool]]:
    """Yield each text, and whether a breakpoint follows it. Blank texts join the one before, with breakpoints."""
    after = set(marks)
    pending: tuple[str, bool] | None = None
    for number, text in enumerate(texts, 1):
        if text.strip():
            if pending is not None:
                yield pending
            pending = text, number in after
        elif pending is not None:
            pending = pending[0] + text, pending[1] or number in after
    if pending is not None:
        yield pending


@dataclass(slots=True, eq=False)
class PromptParts:
    """A prompt in parts: `system`, a text for each document, and `question`.

        PromptParts("Answer briefly.", ["[a]\\n…", "[b]\\n…"], "Question: …", marks=[0, 2]).anthropic()

    In `marks`, 0 is directly after the system prompt.
    """

    system: str
    documents: Sequence[str]
    question: str
    marks: Sequence[int] = ()
    ttl: str | None = None
    explicit: bool = False
    escape: Callable[[str], str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the escaped texts: `escape` cannot be pickled."""
        *documents, question = self.texts()
        return PromptParts, (self.system, documents, question, tuple(self.marks), self.ttl, self.explicit)

    def anthropic(self) -> dict[str, Any]:
        return self._body(partial(anthropic_content, ttl=self.ttl))

    def openai(self) -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        if self.system.strip():
            messages.append({"role": "system", "content": openai_content([self.system], self.before)})
        messages.append({"role": "user", "content": openai_content(self.texts(), self.after)})
        return {"messages": messages} | (cache_options(self.ttl) if self.explicit else {})

    def bedrock(self) -> dict[str, Any]:
        return self._body(partial(bedrock_content, ttl=self.ttl))

    def _body(self, content: Callable[[Sequence[str], Sequence[int]], list[Part]]) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": content(self.texts(), self.after)}]}
        return body | ({"system": content([self.system], self.before)} if self.system.strip() else {})

    @property
    def before(self) -> Sequence[int]:
        return [1] if 0 in self.marks else []

    @property
    def after(self) -> Sequence[int]:
        return [mark for mark in self.marks if mark]

    def texts(self) -> list[str]:
        """Return documents and question such that no two form a special token where they meet."""
        texts: list[str] = []
        before = ""
        for text in (*self.documents, self.question):
            if self.escape is not None:
                text = _apart(before, text, self.escape)
            texts.append(text)
            before = (before + text)[-_LONGEST:]
        return texts


# Upper bound of a special token's length, in characters.
_LONGEST = 128


def _apart(before: str, text: str, escape: Callable[[str], str]) -> str:
    """Return the text, after a filler if it would form a special token with the end of `before`."""
    head = text[:_LONGEST]
    for filler in ("", " ", "\n"):
        seam = before + filler + head
        if escape(seam) == seam:
            return filler + text
    return "\N{REPLACEMENT CHARACTER}" + text
