"""Protocol of the formats, and the own format's line: what each of the others is read into."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from ragorder.common.request_lines import EXAMPLE, RequestLine, Time

EMPTY = "retrievals without documents: let your tracing record their content"


class Step(NamedTuple):
    """A step of a trace, with its id and its parent's; a retrieval has a `request`. `unread`: why a step that may be a
    retrieval has none."""

    request: RequestLine | None = None
    id: str | None = None
    parent: str | None = None
    unread: str = ""


class ExportLine(BaseModel):
    """A line of a log, as the documentation of its software describes it; fields that are not used are ignored.
    `EXAMPLE` shows in messages what a line looks like. `IS_ROW`: it is also a row of a table in CSV."""

    EXAMPLE: ClassVar[str]
    IS_ROW: ClassVar[bool] = False

    model_config = ConfigDict(strict=True)

    @abstractmethod
    def steps(self) -> Iterable[Step]:
        """Its steps, in order, whose requests have their times. Raises ValueError, with a message that quotes nothing
        of the line."""


class OwnLine(RequestLine, ExportLine):
    """A request of ragorder's own format; a log has the times."""

    EXAMPLE = EXAMPLE

    time: Time

    def steps(self) -> Iterable[Step]:
        return (Step(self),)
