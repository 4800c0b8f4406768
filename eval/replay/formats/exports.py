"""Exports of one line a request or step: Langfuse, LangSmith, LiteLLM and Mooncake."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, ValidationError

from ragorder.common.jsonl import problem_of
from ragorder.common.request_lines import Length, LineDocument, PositiveLength, RequestLine, Time
from ragorder.eval.replay.formats.base import EMPTY, ExportLine, Step
from ragorder.eval.replay.formats.documents import exported_document, exported_documents, holds_documents, structure

_RETRIEVES = re.compile("retriev", re.IGNORECASE)
_UNNAMED = (
    "observations of type SPAN with documents, whose name does not say that they retrieve: give them the type RETRIEVER"
)


class LangfuseObservation(ExportLine):
    """An observation, as Langfuse's table, its blob storage export and its API write it. Those of type RETRIEVER are
    requests, and those of type SPAN whose name says that they retrieve: older clients have no other type."""

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


def _from_milliseconds(time: Any) -> Any:
    """Of a number: its JavaScript client writes milliseconds, all else ISO 8601."""
    return time / 1_000 if isinstance(time, int | float) and not isinstance(time, bool) else time


class LangSmithRun(ExportLine):
    """A run in LangSmith's run data format; those of type retriever are requests."""

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


_BLOCK_TOKENS = 512


class MooncakeRequest(ExportLine):
    """A request of Mooncake's traces (FAST '25): blocks of 512 tokens, each by a hash of itself and all before it. Its
    blocks but the last are the documents, and what the last holds is the suffix. An id says what stands before it, so
    no other order of these documents can be served: a replay shows what a cache holds of such a trace, and ordering has
    nothing to gain."""

    EXAMPLE = '{"timestamp": 27, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]}'

    timestamp: Annotated[float, Field(ge=0, le=1e14)]
    """Milliseconds."""
    input_length: PositiveLength
    output_length: Length
    hash_ids: list[int]

    def steps(self) -> Iterable[Step]:
        blocks = (self.input_length - 1) // _BLOCK_TOKENS
        if len(self.hash_ids) < blocks:
            raise ValueError(f'"hash_ids" has too few blocks of {_BLOCK_TOKENS} tokens for "input_length"')
        request = RequestLine(
            time=self.timestamp / 1_000,
            documents=[*self.hash_ids[:blocks]],
            tokens=_BLOCK_TOKENS,
            prefix_tokens=0,
            suffix_tokens=self.input_length - blocks * _BLOCK_TOKENS,
            output_tokens=self.output_length,
        )
        yield Step(request)
