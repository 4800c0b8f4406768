"""Langfuse's observations, a line each, as its table, its blob storage export and its API write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import AliasChoices, Field

from ragorder.common.request_lines import RequestLine, Time
from ragorder.eval.replay.formats.base import ExportLine
from ragorder.eval.replay.formats.documents import exported_documents

__all__ = ["LangfuseObservation"]


class LangfuseObservation(ExportLine):
    """An observation; those of type RETRIEVER are requests."""

    EXAMPLE = (
        '{"type": "RETRIEVER", "start_time": "2025-01-31 12:00:00.000000", '
        '"output": [{"id": "a", "page_content": "…"}]}'
    )

    type: str
    start_time: Time = Field(validation_alias=AliasChoices("start_time", "startTime"))
    output: Any = None

    def requests(self) -> Iterable[RequestLine]:
        if self.type.upper() == "RETRIEVER" and (documents := exported_documents(self.output, "output")):
            yield RequestLine(time=self.start_time, documents=[*documents])
