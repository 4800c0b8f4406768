"""Protocol of the formats, and the own format's line: what each of the others is read into."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

__all__ = ["FIELDS", "ExportLine", "Length", "LogDocument", "LogLine", "PositiveLength", "Time"]

_MAX_TOKENS = 10_000_000
_MAX_TIME_S = 1e11

Length = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]
PositiveLength = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]


def _seconds(time: float | str) -> float:
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


Time = Annotated[int | float | str, AfterValidator(_seconds)]
"""Seconds from any origin, or ISO 8601; in seconds once it is read."""


class LogDocument(BaseModel):
    """Without `tokens`, its length is estimated from its `text`, if there is one."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | int
    tokens: Length | None = None
    text: str | None = None


class ExportLine(BaseModel):
    """A line of a log, as the documentation of its software describes it; fields that are not used are ignored.

    `EXAMPLE` shows in messages what a line looks like."""

    EXAMPLE: ClassVar[str]

    model_config = ConfigDict(strict=True)

    @abstractmethod
    def requests(self) -> Iterable[LogLine]:
        """Its requests, in order: none if the line records something other than a retrieval.

        Raises ValueError, with a message that quotes nothing of the line."""


class LogLine(ExportLine):
    """A request.

    `time`: seconds from any origin, or ISO 8601 (UTC without an offset). `tenant`: tenants share no blocks.
    `documents`: best first; the same id with another length is another document. `tokens`: lengths with headers, one
    for each document or one for all. `prompt_tokens`: in place of `suffix_tokens`."""

    EXAMPLE = '{"time": 12.5, "documents": ["a", "b"], "tokens": [210, 190]}'

    model_config = ConfigDict(strict=True, extra="allow")

    time: Time
    tenant: str | None = None
    documents: list[str | int | LogDocument]
    tokens: list[Length] | Length | None = None
    prefix_tokens: Length | None = None
    suffix_tokens: PositiveLength | None = None
    prompt_tokens: PositiveLength | None = None
    output_tokens: Length | None = None

    def requests(self) -> Iterable[LogLine]:
        return (self,)


FIELDS = tuple(LogLine.model_fields)
