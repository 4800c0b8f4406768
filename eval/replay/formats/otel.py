"""OpenTelemetry's traces in OTLP JSON lines: retrievals by OpenInference's conventions or those of GenAI."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, Field

from ragorder.common.request_lines import LineDocument, RequestLine
from ragorder.eval.replay.formats.base import ExportLine
from ragorder.eval.replay.formats.documents import exported_document, exported_documents

__all__ = ["OTelTraces"]

_GENAI = "gen_ai.retrieval.documents"
_OPENINFERENCE = re.compile(r"retrieval\.documents\.([0-9]{1,6})\.document\.(id|content)")


class _Attribute(BaseModel):
    key: str
    value: dict[str, Any] = Field(default_factory=dict)


class _Span(BaseModel):
    startTimeUnixNano: Annotated[int, Field(ge=0, le=10**20)]  # noqa: N815
    attributes: list[_Attribute] = Field(default_factory=list)

    def documents(self) -> list[LineDocument]:
        fields: dict[int, dict[str, Any]] = {}
        for attribute in self.attributes:
            if attribute.key == _GENAI:
                return exported_documents(_value(attribute.value), _GENAI)
            if found := _OPENINFERENCE.fullmatch(attribute.key):
                fields.setdefault(int(found[1]), {})[found[2]] = _value(attribute.value)
        return [_openinference(place, fields[place]) for place in sorted(fields)]


class _ScopeSpans(BaseModel):
    spans: list[_Span] = Field(default_factory=list)


class _ResourceSpans(BaseModel):
    scopeSpans: list[_ScopeSpans] = Field(default_factory=list)  # noqa: N815


class OTelTraces(ExportLine):
    """Spans of any number of traces; those with documents are requests."""

    EXAMPLE = (
        '{"resourceSpans": [{"scopeSpans": [{"spans": [{"startTimeUnixNano": "1738324800000000000", "attributes": '
        '[{"key": "retrieval.documents.0.document.id", "value": {"stringValue": "a"}}]}]}]}]}'
    )

    resourceSpans: list[_ResourceSpans]  # noqa: N815

    def requests(self) -> Iterable[RequestLine]:
        spans = [span for resource in self.resourceSpans for scope in resource.scopeSpans for span in scope.spans]
        for span in spans:
            if documents := span.documents():
                yield RequestLine(time=span.startTimeUnixNano / 1e9, documents=[*documents])


def _openinference(place: int, fields: dict[str, Any]) -> LineDocument:
    id, content = fields.get("id"), fields.get("content")
    return exported_document(
        id if isinstance(id, str | int) and not isinstance(id, bool) else None,
        content if isinstance(content, str) else None,
        f"retrieval.documents.{place}",
    )


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
