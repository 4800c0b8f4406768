"""Requests as JSON lines, the input format of the commands.

    {"time": 12.5, "tenant": "acme", "documents": ["a", {"id": "b", "text": "…"}], "query": "…"}
    {"time": 13.0, "tenant": "acme", "documents": ["b", "c"], "tokens": [210, 190], "output_tokens": 80}

docs/observing.md describes the fields. Contradictory ones are refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import UTC, datetime
from difflib import get_close_matches
from hashlib import blake2b
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ragorder.common.counts import estimate_tokens
from ragorder.common.jsonl import printable

EXAMPLE = '{"time": 12.5, "documents": ["a", "b"], "tokens": [210, 190]}'

_MAX_TOKENS = 10_000_000
_MAX_TIME_S = 1e11
_MAX_NAMES = 100
_MAX_NAME_LENGTH = 40
# Other names of fields that are too different to be recognised as misprints.
_OTHER_NAMES = {"scope": "tenant", "timestamp": "time", "lengths": "tokens"}

Length = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]
PositiveLength = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]


def seconds_of(time: float | str) -> float:
    """Return seconds, from seconds of any origin or from ISO 8601 (UTC without an offset)."""
    if isinstance(time, str):
        try:
            moment = datetime.fromisoformat(time)
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            raise ValueError(
                "is not an ISO 8601 date and time: write 2025-01-31T12:00:00Z, or seconds as a number"
            ) from None
    if not -_MAX_TIME_S <= time <= _MAX_TIME_S:
        raise ValueError("must be in seconds and is too large for that: divide milliseconds by 1,000")
    return float(time)


def _checked(time: float | str) -> float | str:
    seconds_of(time)
    return time


Time = Annotated[int | float | str, AfterValidator(_checked)]


class LineDocument(BaseModel):
    """A document given as an object. Without `tokens` its length is estimated from its `text`."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | int
    tokens: Length | None = None
    text: str | None = None
    metadata: dict[str, Any] | None = None

    @property
    def name(self) -> Hashable:
        if self.text is None:
            return self.id
        return self.id, blake2b(self.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Lengths(NamedTuple):
    """Documents' lengths, and the numbers of estimated and assumed ones."""

    tokens: list[int]
    estimated: int
    assumed: int


class RequestLine(BaseModel):
    """A request. Unknown fields are kept in `model_extra`.

    `documents` are ids or objects, best first; the same id with another text or length is another document. `tokens`
    are lengths including headers, one for each or one for all. `prompt_tokens` replaces `suffix_tokens`.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    time: Time | None = None
    tenant: str | None = None
    documents: list[str | int | LineDocument]
    tokens: list[Length] | Length | None = None
    prefix_tokens: Length | None = None
    suffix_tokens: PositiveLength | None = None
    prompt_tokens: PositiveLength | None = None
    output_tokens: Length | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if isinstance(self.tokens, list) and len(self.tokens) != len(self.documents):
            raise ValueError(
                f'"tokens" has {len(self.tokens):,} entries and "documents" has {len(self.documents):,}: '
                "give one for each"
            )
        if self.tokens is not None and any(
            isinstance(each, LineDocument) and each.tokens is not None for each in self.documents
        ):
            raise ValueError('give the lengths in "tokens" or in the documents, not in both')
        if self.prompt_tokens is not None and self.suffix_tokens is not None:
            raise ValueError('"prompt_tokens" and "suffix_tokens" exclude each other: leave one of them out')
        return self

    @property
    def ids(self) -> list[str | int]:
        return [each.id if isinstance(each, LineDocument) else each for each in self.documents]

    @property
    def names(self) -> list[Hashable]:
        return [each.name if isinstance(each, LineDocument) else each for each in self.documents]

    def lengths(self, document_tokens: int) -> Lengths:
        """Return the lengths; unknown ones are `document_tokens`, estimates `Estimate`s."""
        if isinstance(self.tokens, list):
            return Lengths(list(self.tokens), 0, 0)
        if self.tokens is not None:
            return Lengths([self.tokens] * len(self.documents), 0, 0)
        tokens, estimated, assumed = [document_tokens] * len(self.documents), 0, 0
        for place, document in enumerate(self.documents):
            if not isinstance(document, LineDocument) or (document.tokens is None and document.text is None):
                assumed += 1
            elif document.tokens is not None:
                tokens[place] = document.tokens
            elif document.text is not None:
                tokens[place] = estimate_tokens(document.text)
                estimated += 1
        return Lengths(tokens, estimated, assumed)

    def tokens_after_documents(self, tokens_before: int) -> int | None:
        """Return the prompt's tokens after its documents, which end at `tokens_before`; None if unknown."""
        if self.prompt_tokens is None:
            return self.suffix_tokens
        if self.prompt_tokens <= tokens_before:
            raise ValueError(
                '"prompt_tokens" must be more than prefix and documents together, which are '
                f"{tokens_before:,} tokens: correct it, or leave it out"
            )
        return self.prompt_tokens - tokens_before


_FIELDS = tuple(RequestLine.model_fields)


class UnreadFields:
    """Unknown fields with the number of their lines, for a bounded number of names."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self._parallel: set[str] = set()

    def add(self, line: RequestLine) -> None:
        for name, value in (line.model_extra or {}).items():
            shown = self._count(name)
            if isinstance(value, list) and len(value) == len(line.documents) > 1:
                self._parallel.add(shown)
        others = [each.model_extra for each in line.documents if isinstance(each, LineDocument) and each.model_extra]
        for name in dict.fromkeys(name for extra in others for name in extra):
            self._count(f"documents[].{name}")

    @property
    def doubtful(self) -> list[str]:
        said = []
        for name, count in self.lines.items():
            if _meant(name):
                said.append(describe(name, count))
            elif name in self._parallel:
                said.append(f"{describe(name, count)}, which stays in retrieval order")
        return said

    def _count(self, name: str) -> str:
        shown = printable(name)[:_MAX_NAME_LENGTH]
        if shown in self.lines or len(self.lines) < _MAX_NAMES:
            self.lines[shown] = self.lines.get(shown, 0) + 1
        return shown


def describe(name: str, lines: int) -> str:
    meant = _meant(name)
    return f"{name} ({lines:,} line{'s' * (lines != 1)}{f'; was {meant} meant?' if meant else ''})"


def _meant(name: str) -> str | None:
    near = get_close_matches(name, _FIELDS, n=1, cutoff=0.8)
    return near[0] if near else _OTHER_NAMES.get(name)
