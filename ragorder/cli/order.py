"""The command `ragorder order`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite
from typing import IO, Any

import click

from ragorder.cli.options import Command, Count, build, option, options_from, section
from ragorder.cli.output import StreamFile
from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.settings import Settings

__all__ = ["order"]

_EXAMPLE = '{"documents": [{"id": "a", "text": "…"}, {"id": "b", "tokens": 200}]}'


class LineError(click.ClickException):
    """A line of the input cannot be read."""


@dataclass(frozen=True, slots=True)
class _OrderRequest:
    number: int
    documents: list[Document]
    scope: str | None
    echo: dict[str, Any]


@click.command(cls=Command)
@click.argument("requests", type=StreamFile("rb"), default="-")
@section(
    "Engine and prompt",
    options_from(Settings, "capacity_tokens", "block_size", "prefix_tokens", "suffix_tokens"),
    option(
        "--document-tokens",
        type=Count(0),
        default=256,
        show_default=True,
        metavar="TOKENS",
        help="Length of a document without text and tokens.",
    ),
)
@section(
    "Order",
    options_from(
        Settings,
        "search",
        "tail",
        "residency",
        "keep_first",
        "keep_last",
        "max_displacement",
        "keep_groups",
    ),
    option(
        "--waiting", type=Count(0), default=0, show_default=True, metavar="N", help="Look ahead at the next N requests."
    ),
)
@section(
    "Batches",
    option(
        "--batch",
        is_flag=True,
        help="Reorder the requests as well: read all of them, plan them together, and serve requests that share "
        "documents one after another.",
    ),
    option(
        "--max-wait",
        type=Count(0),
        metavar="PLACES",
        help="With --batch: a request is served at most this many places late. [default: any number]",
    ),
)
@option("-o", "--output", type=StreamFile("w", encoding="utf-8"), default="-", help="Output file. [default: -]")
def order(
    requests: IO[bytes],
    output: IO[str],
    document_tokens: int,
    waiting: int,
    batch: bool,
    max_wait: int | None,
    **options: Any,
) -> None:
    """Order the documents of each request in a file of JSON lines.

    REQUESTS is that file, or - for standard input. A request is {"documents": [{"id", "text", "tokens", "metadata"},
    …], "scope"}, best document first; only ids are needed, a bare string stands for one, and other fields are passed
    through. An order repeats those fields and gives "documents" (ids, in the order of the prompt), "permutation"
    (their retrieval ranks, from 0), "index" (the number of the request), and the cached "prefix_documents" and
    "cached_tokens" that are predicted.

    Every order counts as served.
    """
    if max_wait is not None and not batch:
        raise click.UsageError("--max-wait goes with --batch")
    orderer = Orderer(build(Settings, options))
    read = _read(requests, document_tokens)
    ordered = _in_batches(orderer, read, max_wait) if batch else _one_by_one(orderer, read, waiting)
    for request, ordering in ordered:
        ordering.confirm()
        output.write(json.dumps(_as_json(request, ordering)) + "\n")
        output.flush()


def _one_by_one(
    orderer: Orderer, requests: Iterator[_OrderRequest], waiting: int
) -> Iterator[tuple[_OrderRequest, Ordering[Document]]]:
    backlog: deque[_OrderRequest] = deque()
    failure: LineError | None = None
    try:
        for request in requests:
            backlog.append(request)
            if len(backlog) > waiting:
                yield _order_first(orderer, backlog)
    except LineError as error:
        failure = error
    while backlog:
        yield _order_first(orderer, backlog)
    if failure:
        raise failure


def _order_first(orderer: Orderer, backlog: deque[_OrderRequest]) -> tuple[_OrderRequest, Ordering[Document]]:
    request = backlog.popleft()
    waiting = [later.documents for later in backlog if later.scope == request.scope]
    return request, orderer.order(request.documents, waiting=waiting, scope=request.scope)


def _in_batches(
    orderer: Orderer, requests: Iterator[_OrderRequest], max_wait: int | None
) -> Iterator[tuple[_OrderRequest, Ordering[Document]]]:
    """One batch a scope: documents of one tenant are never planned with those of another."""
    by_scope: dict[str | None, list[_OrderRequest]] = {}
    for request in requests:
        by_scope.setdefault(request.scope, []).append(request)
    for scope, members in by_scope.items():
        documents = [request.documents for request in members]
        for ordering in orderer.order_batch(documents, scope=scope, max_wait=max_wait):
            yield members[ordering.index], ordering


def _as_json(request: _OrderRequest, ordering: Ordering[Document]) -> dict[str, Any]:
    return {
        **request.echo,
        "index": request.number,
        "documents": [document.id for document in ordering.documents],
        "permutation": list(ordering.permutation),
        "prefix_documents": ordering.prefix_documents,
        "cached_tokens": ordering.cached_tokens,
    }


def _read(lines: IO[bytes], unknown_tokens: int) -> Iterator[_OrderRequest]:
    name = getattr(lines, "name", "-")
    name = "<stdin>" if name in ("-", 0) else name
    number = 0
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue

        def fail(problem: str, line_number: int = line_number) -> LineError:
            return LineError(f"{name}:{line_number}: {problem}")

        try:
            fields = json.loads(line, parse_constant=_refuse, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            raise fail(f"no JSON ({error}); a request looks like {_EXAMPLE}") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("documents"), list):
            raise fail(f'no object with a list "documents"; a request looks like {_EXAMPLE}')
        scope = fields.get("scope")
        if scope is not None and not isinstance(scope, str):
            raise fail('"scope" must be a string')
        documents = [_document(entry, place, unknown_tokens, fail) for place, entry in enumerate(fields["documents"])]
        echo = {field: value for field, value in fields.items() if field != "documents"}
        yield _OrderRequest(number, documents, scope, echo)
        number += 1


def _document(entry: Any, place: int, unknown_tokens: int, fail: Callable[[str], LineError]) -> Document:
    fields = {"id": entry} if isinstance(entry, str) else entry
    if not isinstance(fields, dict) or "id" not in fields:
        raise fail(f'documents[{place}] must be an id or an object with an "id"')
    text, tokens, metadata = fields.get("text"), fields.get("tokens"), fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise fail(f"documents[{place}].metadata must be an object")
    if text is None and tokens is None:
        tokens = unknown_tokens
    try:
        return Document(fields["id"], "" if text is None else text, tokens, metadata=metadata or {})
    except (TypeError, ValueError) as error:
        raise fail(f"documents[{place}]: {error}") from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    return number if isfinite(number) else _refuse(text)
