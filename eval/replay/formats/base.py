"""Protocol of the formats, and the own format's line: what each of the others is read into."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from ragorder.common.request_lines import EXAMPLE, RequestLine, Time

__all__ = ["ExportLine", "OwnLine"]


class ExportLine(BaseModel):
    """A line of a log, as the documentation of its software describes it; fields that are not used are ignored.

    `EXAMPLE` shows in messages what a line looks like."""

    EXAMPLE: ClassVar[str]

    model_config = ConfigDict(strict=True)

    @abstractmethod
    def requests(self) -> Iterable[RequestLine]:
        """Its requests, in order, with their times: none if the line records something other than a retrieval.

        Raises ValueError, with a message that quotes nothing of the line."""


class OwnLine(RequestLine, ExportLine):
    """A request of ragorder's own format; a log has the times."""

    EXAMPLE = EXAMPLE

    time: Time

    def requests(self) -> Iterable[RequestLine]:
        return (self,)
