"""Requests in files of JSON lines, as `ragorder order` and `ragorder plan` read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import click
from pydantic import BaseModel, ConfigDict, Field

from ragorder.cli.options import Count, Decorator, option
from ragorder.document import Document
from ragorder.jsonl import JSONLines

__all__ = ["DocumentFields", "LineError", "RequestLine", "RequestToOrder", "document_tokens_option", "read_requests"]

_EXAMPLE = '{"documents": [{"id": "a", "text": "…"}, {"id": "b", "tokens": 200}]}'


class LineError(click.ClickException):
    """A line of the input cannot be read."""


class DocumentFields(BaseModel):
    """A document of a request."""

    model_config = ConfigDict(strict=True)

    id: str
    text: str | None = None
    tokens: int | None = Field(None, ge=0)
    metadata: dict[str, Any] | None = None


class RequestLine(BaseModel):
    """A request; other fields are passed through."""

    model_config = ConfigDict(strict=True, extra="allow")

    documents: list[str | DocumentFields]
    scope: str | None = None


@dataclass(frozen=True, slots=True)
class RequestToOrder:
    """A request by its place in the input, and the fields that are passed through."""

    index: int
    documents: list[Document]
    scope: str | None
    echo: dict[str, Any]


def document_tokens_option() -> Decorator:
    """--document-tokens."""
    return option(
        "--document-tokens",
        type=Count(0),
        default=256,
        show_default=True,
        metavar="TOKENS",
        help="Length of a document without text and tokens.",
    )


def read_requests(
    source: IO[bytes], default_tokens: int, progress: Callable[[str, int], Callable[[], None]] | None = None
) -> Iterator[RequestToOrder]:
    """The requests of an open file, plain, gzipped or in xz. Raises LineError with the number of the line."""
    lines = JSONLines(source, error=LineError, example=_EXAMPLE, progress=progress)
    for index, (_, line) in enumerate(lines.read(RequestLine)):
        documents = [_document(each, default_tokens) for each in line.documents]
        scope = {"scope": line.scope} if "scope" in line.model_fields_set else {}
        yield RequestToOrder(index, documents, line.scope, scope | (line.model_extra or {}))


def _document(fields: str | DocumentFields, default_tokens: int) -> Document:
    if isinstance(fields, str):
        return Document(fields, tokens=default_tokens)
    tokens = default_tokens if fields.text is None and fields.tokens is None else fields.tokens
    return Document(fields.id, fields.text or "", tokens, metadata=fields.metadata or {})
