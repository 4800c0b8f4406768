"""Requests to order, read from lines, and the lines of their orders."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import click

from ragorder.cli.options import Decorator, option
from ragorder.cli.values import Count
from ragorder.common.jsonl import JSONLines
from ragorder.common.request_lines import EXAMPLE, LineDocument, RequestLine, UnreadFields
from ragorder.errors import RagorderError


class LineError(RagorderError, click.ClickException): ...


class RequestDocument(NamedTuple):
    """A document as an `Orderer` reads it. Its `key` is that of its content and length."""

    id: str | int
    key: Hashable
    token_count: int
    text: str = ""
    metadata: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class RequestToOrder:
    """A request with its number in the input, and the fields that its order repeats (`echo`).

    Requests of different `scope` (tenant and prefix length) share nothing.
    """

    index: int
    documents: list[RequestDocument]
    scope: tuple[str | None, int | None]
    prefix_tokens: int | None
    suffix_tokens: int | None
    echo: dict[str, Any]

    @property
    def ids(self) -> list[str | int]:
        return [document.id for document in self.documents]


def document_tokens_option() -> Decorator:
    return option(
        "--document-tokens",
        type=Count(0),
        default=256,
        show_default=True,
        metavar="TOKENS",
        help="Length of a document without text and tokens.",
    )


def read_requests(
    source: IO[bytes],
    document_tokens: int,
    prefix_tokens: int = 0,
    *,
    unread: UnreadFields | None = None,
    progress: Callable[[str, int], Callable[[], None]] | None = None,
) -> Iterator[RequestToOrder]:
    lines = JSONLines(source, error=LineError, example=EXAMPLE, progress=progress)
    for index, (number, line) in enumerate(lines.read(RequestLine)):
        if unread is not None:
            unread.add(line)
        try:
            yield _request(index, line, document_tokens, prefix_tokens)
        except ValueError as error:
            raise lines.error(number, str(error)) from None


def _request(index: int, line: RequestLine, document_tokens: int, prefix_tokens: int) -> RequestToOrder:
    tokens = line.lengths(document_tokens).tokens
    documents = [
        RequestDocument(id, (name, length), length, *_content(given))
        for id, name, length, given in zip(line.ids, line.names, tokens, line.documents, strict=True)
    ]
    prefix = prefix_tokens if line.prefix_tokens is None else line.prefix_tokens
    known = [line.tokens_after_documents(prefix + sum(tokens)), line.output_tokens]
    suffix = sum(each or 0 for each in known) if any(each is not None for each in known) else None
    echo = line.model_dump(exclude={"documents"}, exclude_unset=True)
    return RequestToOrder(index, documents, (line.tenant, line.prefix_tokens), line.prefix_tokens, suffix, echo)


def _content(document: str | int | LineDocument) -> tuple[str, Mapping[str, Any]]:
    return (document.text or "", document.metadata or {}) if isinstance(document, LineDocument) else ("", {})


def order_line(
    echo: Mapping[str, Any],
    index: int,
    ids: Sequence[str | int],
    permutation: Sequence[int],
    prefix_documents: int,
    cached_tokens: int,
) -> dict[str, Any]:
    given = echo.get("tokens")
    moved = {"tokens": [given[rank] for rank in permutation]} if isinstance(given, list) else {}
    return {
        **echo,
        **moved,
        "index": index,
        "documents": [ids[rank] for rank in permutation],
        "permutation": list(permutation),
        "prefix_documents": prefix_documents,
        "cached_tokens": cached_tokens,
    }


def warn_of(unread: UnreadFields) -> None:
    if doubtful := unread.doubtful:
        click.echo(f"Warning: fields that were repeated but not read: {', '.join(doubtful)}", err=True)
