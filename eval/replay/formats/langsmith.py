"""LangSmith's runs, a line each, in its run data format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Field

from ragorder.common.request_lines import RequestLine, Time
from ragorder.eval.replay.formats.base import EMPTY, ExportLine, Step
from ragorder.eval.replay.formats.documents import exported_documents


def _from_milliseconds(time: Any) -> Any:
    """Of a number: its JavaScript client writes milliseconds, all else ISO 8601."""
    return time / 1_000 if isinstance(time, int | float) and not isinstance(time, bool) else time


class LangSmithRun(ExportLine):
    """A run; those of type retriever are requests."""

    EXAMPLE = (
        '{"run_type": "retriever", "start_time": "2025-01-31T12:00:00", '
        '"outputs": {"documents": [{"page_content": "…"}]}}'
    )

    IS_ROW = True

    id: str | None = None
    parent: str | None = Field(default=None, validation_alias=AliasChoices("parent_run_id", "parent_id"))
    run_type: str
    start_time: Annotated[Time, BeforeValidator(_from_milliseconds)]
    outputs: Any = None

    def steps(self) -> Iterable[Step]:
        request, unread = None, ""
        if self.run_type.lower() == "retriever":
            documents = exported_documents(self.outputs, "outputs")
            request = RequestLine(time=self.start_time, documents=[*documents]) if documents else None
            unread = EMPTY
        yield Step(request, self.id, self.parent, unread)
