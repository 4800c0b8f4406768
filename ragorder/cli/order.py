"""The command `ragorder order`."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import click

from ragorder.cli.options import Command, Count, build_orderer, option, options_from, section
from ragorder.cli.output import StreamFile
from ragorder.cli.prompt_files import PromptFiles
from ragorder.cli.request_lines import (
    LineError,
    RequestDocument,
    RequestToOrder,
    document_tokens_option,
    order_line,
    read_requests,
    warn_of,
)
from ragorder.orderer import Lengths, Orderer
from ragorder.ordering import Ordering
from ragorder.request_lines import UnreadFields
from ragorder.settings import Settings

__all__ = ["order"]


@click.command(cls=Command)
@click.argument("requests", type=StreamFile("rb"), default="-")
@section(
    "Engine and prompt",
    options_from(Settings, "capacity_tokens", "block_size", "prefix_tokens", "suffix_tokens"),
    document_tokens_option(),
)
@section(
    "Order",
    options_from(
        Settings,
        "search",
        "moves",
        "best",
        "best_tokens",
        "residency",
        "keep_first",
        "keep_last",
        "max_displacement",
        "max_gain_lost",
        "min_gain",
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
@section(
    "Prompts for benchmarks",
    option(
        "--prompts",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="FOLDER",
        help="Write the prompts into this folder, too: retrieval.jsonl and ordered.jsonl, for the custom dataset of "
        "vllm bench serve, and for guidellm. Documents must have texts, and requests a query.",
    ),
    option(
        "--output-tokens",
        type=Count(1),
        default=16,
        show_default=True,
        metavar="TOKENS",
        help='With --prompts: the length of an answer, where a request has no "output_tokens" of its own.',
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
    prompts: Path | None,
    output_tokens: int,
    **options: Any,
) -> None:
    """Order the documents of each request in a file of JSON lines.

    REQUESTS is that file, plain or gzipped, or - for standard input, in the lines of `ragorder replay`: "documents"
    (ids, best first, or objects with "id", "tokens", "text" and "metadata") and, where they are known, "tenant",
    "tokens" and other lengths; without "time", as lines are served as they come. An order repeats all fields and gives
    "documents" (ids, in the order of the prompt; a list "tokens" is in the same order), "permutation" (their retrieval
    ranks, from 0), "index" (the number of the request), and the cached "prefix_documents" and "cached_tokens" that are
    predicted.

    Every order counts as served.
    """
    if max_wait is not None and not batch:
        raise click.UsageError("--max-wait requires --batch")
    orderer = build_orderer(options)
    unread = UnreadFields()
    read = read_requests(requests, document_tokens, orderer.settings.prefix_tokens, unread=unread)
    with ExitStack() as stack:
        files = stack.enter_context(PromptFiles(prompts, output_tokens)) if prompts else None
        read = files.retrieved(read) if files else read
        ordered = _in_batches(orderer, read, max_wait) if batch else _one_by_one(orderer, read, waiting)
        for request, ordering in ordered:
            ordering.confirm()
            output.write(json.dumps(_as_json(request, ordering)) + "\n")
            output.flush()
            if files:
                files.ordered(request, ordering)
    warn_of(unread)


def _one_by_one(
    orderer: Orderer, requests: Iterator[RequestToOrder], waiting: int
) -> Iterator[tuple[RequestToOrder, Ordering[RequestDocument]]]:
    backlog: deque[RequestToOrder] = deque()
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


def _order_first(orderer: Orderer, backlog: deque[RequestToOrder]) -> tuple[RequestToOrder, Ordering[RequestDocument]]:
    request = backlog.popleft()
    waiting = [later.documents for later in backlog if later.scope == request.scope]
    ordering = orderer.order(
        request.documents,
        waiting=waiting,
        scope=request.scope,
        lengths=Lengths(prefix=request.prefix_tokens, suffix=request.suffix_tokens),
    )
    return request, ordering


def _in_batches(
    orderer: Orderer, requests: Iterator[RequestToOrder], max_wait: int | None
) -> Iterator[tuple[RequestToOrder, Ordering[RequestDocument]]]:
    """One batch a scope: documents of one tenant are never planned with those of another."""
    by_scope: dict[Hashable, list[RequestToOrder]] = {}
    for request in requests:
        by_scope.setdefault(request.scope, []).append(request)
    for scope, members in by_scope.items():
        documents = [request.documents for request in members]
        known = [request.suffix_tokens for request in members if request.suffix_tokens is not None]
        lengths = Lengths(members[0].prefix_tokens, round(sum(known) / len(known)) if known else None)
        for ordering in orderer.order_batch(documents, scope=scope, lengths=lengths, max_wait=max_wait):
            yield members[ordering.index], ordering


def _as_json(request: RequestToOrder, ordering: Ordering[RequestDocument]) -> dict[str, Any]:
    return order_line(
        request.echo,
        request.index,
        request.ids,
        ordering.permutation,
        ordering.prefix_documents,
        ordering.cached_tokens,
    )
