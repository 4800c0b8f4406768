"""Langfuse's observations, a line each, as its table, its blob storage export and its API write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import AliasChoices, Field

from ragorder.common.request_lines import RequestLine, Time
from ragorder.eval.replay.formats.base import EMPTY, ExportLine, Step
from ragorder.eval.replay.formats.documents import exported_documents, holds_documents

_RETRIEVES = re.compile("retriev", re.IGNORECASE)
_UNNAMED = (
    "observations of type SPAN with documents, whose name does not say that they retrieve: give them the type RETRIEVER"
)


class LangfuseObservation(ExportLine):
    """An observation; those of type RETRIEVER are requests, and those of type SPAN whose name says that they retrieve:
    older clients have no other type."""

    EXAMPLE = (
        '{"type": "RETRIEVER", "start_time": "2025-01-31 12:00:00.000000", '
        '"output": [{"id": "a", "page_content": "…"}]}'
    )
    IS_ROW = True

    id: str | None = None
    parent: str | None = Field(
        default=None, validation_alias=AliasChoices("parent_observation_id", "parentObservationId")
    )
    type: str
    name: str | None = None
    start_time: Time = Field(validation_alias=AliasChoices("start_time", "startTime"))
    output: Any = None

    def steps(self) -> Iterable[Step]:
        request, unread = None, ""
        kind, has_documents = self.type.upper(), holds_documents(self.output)
        is_named = _RETRIEVES.search(self.name or "") is not None
        if kind == "RETRIEVER" or (kind == "SPAN" and is_named and has_documents):
            documents = exported_documents(self.output, "output")
            request = RequestLine(time=self.start_time, documents=[*documents]) if documents else None
            unread = EMPTY
        elif kind == "SPAN" and (is_named or has_documents):
            unread = _UNNAMED if has_documents else EMPTY
        yield Step(request, self.id, self.parent, unread)
