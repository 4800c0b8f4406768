"""OpenTelemetry's traces in OTLP JSON lines, and MLflow's: retrievals by the conventions of OpenInference, GenAI,
OpenLLMetry and MLflow."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AliasChoices, AliasPath, BaseModel, Field

from ragorder.common.request_lines import LineDocument, RequestLine
from ragorder.eval.replay.formats.base import EMPTY, ExportLine, Step
from ragorder.eval.replay.formats.documents import exported_documents, holds_documents

_OPENINFERENCE = re.compile(r"retrieval\.documents\.([0-9]{1,6})\.document\.(id|content)")
# Attributes that hold all documents of a span, and those that mark it as a retrieval; GenAI's needs no mark.
_OUTPUTS: dict[str, str | None] = {
    "gen_ai.retrieval.documents": None,
    "output.value": "openinference.span.kind",
    "mlflow.spanOutputs": "mlflow.spanType",
    "traceloop.entity.output": "gen_ai.operation.name",
}
# What marks a retrieval: kinds and operations, OpenLLMetry's names of LlamaIndex's steps, and searches of databases.
_MARKS = {
    "openinference.span.kind": re.compile("RETRIEVER"),
    "gen_ai.operation.name": re.compile("retrieval|vector_db_retrieve"),
    "mlflow.spanType": re.compile('"?RETRIEVER"?'),
    "traceloop.entity.name": re.compile(r"(\w*Retriever|retrieve)(\.\w+)?"),
    "db.operation": re.compile("_?query|search|hybrid_search"),
}
_RESULTS = ("db.query.result", "db.search.result")
_QUERY_COUNT = re.compile(r"db\.\w+\.query\.(query_)?(embeddings|texts)_count")
_UNMARKED = (
    "spans with documents that are not marked as retrievals: set openinference.span.kind to RETRIEVER, or "
    "gen_ai.operation.name to retrieval"
)

Nanoseconds = Annotated[int, Field(ge=0, le=10**20)]


class _Attribute(BaseModel):
    key: str
    value: dict[str, Any] = Field(default_factory=dict)


class _Event(BaseModel):
    name: str = ""
    attributes: list[_Attribute] = Field(default_factory=list)


class _Span(BaseModel):
    startTimeUnixNano: Nanoseconds  # noqa: N815
    spanId: str | None = None  # noqa: N815
    parentSpanId: str | None = None  # noqa: N815
    attributes: list[_Attribute] = Field(default_factory=list)
    events: list[_Event] = Field(default_factory=list)

    def steps(self) -> Iterator[Step]:
        results = [_plain(each.attributes) for each in self.events if each.name in _RESULTS]
        yield from _steps(_plain(self.attributes), self.startTimeUnixNano, self.spanId, self.parentSpanId, results)


class _ScopeSpans(BaseModel):
    spans: list[_Span] = Field(default_factory=list)


class _ResourceSpans(BaseModel):
    scopeSpans: list[_ScopeSpans] = Field(default_factory=list)  # noqa: N815


class OTelTraces(ExportLine):
    """Spans of any number of traces; retrievals with documents are requests."""

    EXAMPLE = (
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1738324800000000000", "attributes": '
        '[{"key": "retrieval.documents.0.document.id", "value": {"stringValue": "a"}}]}]}]}]}'
    )

    resourceSpans: list[_ResourceSpans]  # noqa: N815

    def steps(self) -> Iterable[Step]:
        for resource in self.resourceSpans:
            for scope in resource.scopeSpans:
                for span in scope.spans:
                    yield from span.steps()


class _MLflowSpan(BaseModel):
    start: Nanoseconds = Field(validation_alias=AliasChoices("start_time_unix_nano", "start_time"))
    id: str | None = Field(default=None, validation_alias=AliasChoices("span_id", AliasPath("context", "span_id")))
    parent: str | None = Field(default=None, validation_alias=AliasChoices("parent_span_id", "parent_id"))
    attributes: dict[str, Any] = Field(default_factory=dict)


class _MLflowData(BaseModel):
    spans: list[_MLflowSpan] = Field(default_factory=list)


class MLflowTrace(ExportLine):
    """A trace as `Trace.to_json` and `mlflow traces get` write it; its spans of type RETRIEVER are requests."""

    EXAMPLE = (
        '{"info": {}, "data": {"spans": [{"start_time_unix_nano": 1738324800000000000, "attributes": '
        '{"mlflow.spanType": "\\"RETRIEVER\\"", "mlflow.spanOutputs": "[{\\"page_content\\": \\"…\\"}]"}}]}}'
    )

    data: _MLflowData

    def steps(self) -> Iterable[Step]:
        for span in self.data.spans:
            yield from _steps(span.attributes, span.start, span.id, span.parent)


def _steps(
    attributes: Mapping[str, Any],
    start_ns: int,
    id: str | None,
    parent: str | None,
    results: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Step]:
    retrieved = _retrieved(attributes, results)
    if retrieved:
        yield from (Step(RequestLine(time=start_ns / 1e9, documents=[*each]), id, parent) for each in retrieved)
        return
    has_documents = any(holds_documents(attributes.get(output)) for output in _OUTPUTS)
    is_empty = any(_is_marked(attributes, mark) for mark in _MARKS)
    yield Step(None, id, parent, EMPTY if is_empty else _UNMARKED if has_documents else "")


def _retrieved(attributes: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[list[LineDocument]]:
    """The documents of each retrieval of a span."""
    fields: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if found := _OPENINFERENCE.fullmatch(key):
            fields.setdefault(int(found[1]), {})[found[2]] = value
    outputs: Iterable[tuple[str, Any]] = [(output, attributes[output]) for output in _OUTPUTS if output in attributes]
    if fields:
        outputs = [("retrieval.documents", [fields[place] for place in sorted(fields)])]
    elif results:
        outputs = [("db.query.result", each) for each in _by_query(attributes, results)]
    else:
        outputs = [(output, value) for output, value in outputs if _is_retrieved(attributes, output)]
    return [documents for field, value in outputs if (documents := exported_documents(value, field))]


def _is_retrieved(attributes: Mapping[str, Any], output: str) -> bool:
    """Whether a span's output is documents. A name is no more than a hint, so the output must look like it, too."""
    mark = _OUTPUTS[output]
    is_named = _is_marked(attributes, "traceloop.entity.name") and holds_documents(attributes[output])
    return mark is None or is_named or _is_marked(attributes, mark)


def _by_query(attributes: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    """The results of a database by its queries. Milvus numbers these; Chroma's follow one another, equally many."""
    counts = (value for key, value in attributes.items() if _QUERY_COUNT.fullmatch(key) and type(value) is int)
    queries = max(1, *counts, 1)
    if len(results) % queries:
        raise ValueError(f'"db.query.result" events of {queries:,} queries cannot be told apart: send one at a time')
    grouped: dict[Any, list[dict[str, Any]]] = {}
    for place, result in enumerate(results):
        fields = {key.partition(".result.")[2]: value for key, value in result.items()}
        if fields.keys() & {"id", "document"}:
            query = result.get("db.search.query.id", place * queries // len(results))
            grouped.setdefault(query, []).append(fields)
    return [*grouped.values()]


def _is_marked(attributes: Mapping[str, Any], mark: str) -> bool:
    value = attributes.get(mark)
    return isinstance(value, str) and _MARKS[mark].fullmatch(value) is not None


def _plain(attributes: Iterable[_Attribute]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: dict[str, Any]) -> Any:
    """An attribute's value in OTLP's JSON encoding. Integers are strings there."""
    if "arrayValue" in value:
        return [_value(each) for each in _entries(value["arrayValue"]) if isinstance(each, dict)]
    if "kvlistValue" in value:
        pairs = [each for each in _entries(value["kvlistValue"]) if isinstance(each, dict)]
        return {str(each.get("key")): _value(each["value"]) for each in pairs if isinstance(each.get("value"), dict)}
    if isinstance(number := value.get("intValue"), str) and re.fullmatch(r"-?[0-9]{1,19}", number):
        return int(number)
    return next(
        (value[name] for name in ("stringValue", "intValue", "doubleValue", "boolValue") if name in value), None
    )


def _entries(value: Any) -> list[Any]:
    entries = value.get("values") if isinstance(value, dict) else None
    return entries if isinstance(entries, list) else []
