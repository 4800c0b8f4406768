"""LiteLLM's spend logs, a row a line: searches of vector stores stand in the metadata of their request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

from ragorder.common.jsonl import problem_of
from ragorder.common.request_lines import Length, LineDocument, RequestLine, Time
from ragorder.eval.replay.formats.base import EMPTY, ExportLine, Step
from ragorder.eval.replay.formats.documents import exported_document, structure

_REDACTED = "REDACTED_BY_LITELM"


class _Content(BaseModel):
    text: str | None = None


class _Result(BaseModel):
    file_id: str | None = None
    filename: str | None = None
    content: list[_Content] | None = None

    def document(self, field: str) -> LineDocument:
        """By its text: the chunks of a file share its id. Where texts are not stored there is the file alone."""
        texts = [each.text for each in self.content or () if each.text and _REDACTED not in each.text]
        if texts:
            return exported_document(None, "\n".join(texts), field)
        return exported_document(self.file_id or self.filename, None, field)


class _Response(BaseModel):
    data: list[_Result] | None = None


class _Search(BaseModel):
    vector_store_search_response: _Response | None = None


class _Metadata(BaseModel):
    vector_store_request_metadata: list[_Search] | None = None


class LiteLLMSpendLog(ExportLine):
    """A row of LiteLLM_SpendLogs; those whose metadata have searches of vector stores are requests. Their prompt tokens
    are not used: the lengths of documents are estimates, and would contradict them."""

    EXAMPLE = (
        '{"startTime": "2025-01-31T12:00:00", "completion_tokens": 40, "metadata": {"vector_store_request_metadata": '
        '[{"vector_store_search_response": {"data": [{"file_id": "a", "content": [{"text": "…"}]}]}}]}}'
    )

    IS_ROW = True

    startTime: Time  # noqa: N815
    completion_tokens: Length | None = None
    metadata: Any = None

    def steps(self) -> Iterable[Step]:
        metadata = structure(self.metadata, "metadata") or {}
        try:
            searches = _Metadata.model_validate(metadata).vector_store_request_metadata or ()
        except ValidationError as error:
            raise ValueError(f'"metadata": {problem_of(error, metadata)}') from None
        field = "metadata.vector_store_request_metadata"
        responses = [each.vector_store_search_response for each in searches if each.vector_store_search_response]
        documents = [result.document(field) for response in responses for result in response.data or ()]
        if documents:
            yield Step(RequestLine(time=self.startTime, documents=[*documents], output_tokens=self.completion_tokens))
        elif searches:
            yield Step(unread=EMPTY)
