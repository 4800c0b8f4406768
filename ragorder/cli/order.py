"""The command `ragorder order`."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import click

from ragorder.cli.options import Command, build_orderer, option, options_from, section
from ragorder.cli.planning.requests import (
    LineError,
    RequestDocument,
    RequestToOrder,
    document_tokens_option,
    order_line,
    read_requests,
    warn_of,
)
from ragorder.cli.values import Count, StreamFile
from ragorder.common.request_lines import UnreadFields
from ragorder.document import Document
from ragorder.orderer import Orderer
from ragorder.ordering import Ordering
from ragorder.prompt import PromptBuilder
from ragorder.scope.request import Lengths
from ragorder.settings import Settings

_FILES = ("retrieval.jsonl", "ordered.jsonl")
_QUERIES = ("query", "question")
_OUTPUT_TOKENS = 16


@click.command(
    cls=Command,
    examples=[
        "ragorder order requests.jsonl -o ordered.jsonl",
        "ragorder order requests.jsonl --batch --max-wait 100",
        "ragorder order requests.jsonl --prompts prompts/",
    ],
)
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
        help="With --batch: a request is served at most this many places late.",
        unset="any number",
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
        metavar="TOKENS",
        help='With --prompts: the length of an answer, where a request has no "output_tokens" of its own.',
        unset=str(_OUTPUT_TOKENS),
    ),
)
@option("-o", "--output", type=StreamFile("w", encoding="utf-8"), default="-", help="Output file.", unset="-")
def order(
    requests: IO[bytes],
    output: IO[str],
    document_tokens: int,
    waiting: int,
    batch: bool,
    max_wait: int | None,
    prompts: Path | None,
    output_tokens: int | None,
    **options: Any,
) -> None:
    """Order the documents of each request in a file of JSON lines.

    REQUESTS is that file, plain or gzipped, or - for standard input, in the lines of `ragorder replay` without "time":
    "documents" (ids, best first, or objects with "id", "tokens", "text" and "metadata") and, if known, "tenant",
    "tokens" and other lengths. An output line repeats all fields, with "documents" and "tokens" in prompt order, and
    adds "permutation" (retrieval ranks, from 0), "index" (the number of the request), and the predicted
    "prefix_documents" and "cached_tokens" of the cached prefix.

    Every order counts as served.
    """
    if max_wait is not None and not batch:
        raise click.UsageError("--max-wait requires --batch")
    if waiting and batch:
        raise click.UsageError("--waiting and --batch exclude each other: a batch looks ahead at all requests")
    if output_tokens is not None and prompts is None:
        raise click.UsageError("--output-tokens requires --prompts")
    _check_apart(requests, output, prompts)
    orderer = build_orderer(options)
    unread = UnreadFields()
    read = read_requests(requests, document_tokens, orderer.settings.prefix_tokens, unread=unread)
    with ExitStack() as stack:
        files = stack.enter_context(PromptFiles.opened(prompts, output_tokens or _OUTPUT_TOKENS)) if prompts else None
        read = files.retrieved(read) if files else read
        ordered = _in_batches(orderer, read, max_wait) if batch else _one_by_one(orderer, read, waiting)
        for request, ordering in ordered:
            ordering.confirm()
            line = order_line(
                request.echo,
                request.index,
                request.ids,
                ordering.permutation,
                ordering.prefix_documents,
                ordering.cached_tokens,
            )
            output.write(json.dumps(line) + "\n")
            output.flush()
            if files:
                files.ordered(request, ordering)
        # click opens a file at its first text: without requests, earlier orders would stay in it.
        output.write("")
    warn_of(unread)


def _check_apart(requests: IO[bytes], output: IO[str], prompts: Path | None) -> None:
    """Refuse to write over the requests while they are read, or two files into one."""
    prompt_files = [prompts / name for name in _FILES] if prompts else []
    # The output's own fileno() would open the file, and so empty it.
    written = _identity(lambda: sys.stdout.fileno() if output.name == "<stdout>" else output.name)
    read = _identity(requests.fileno)
    if read and read in (written, *(_identity(partial(str, path)) for path in prompt_files)):
        raise click.UsageError("an output is the file of the requests: name another")
    if any(os.path.realpath(output.name) == os.path.realpath(path) for path in prompt_files):
        raise click.UsageError("-o names a file of --prompts: name another")


def _identity(place: Callable[[], int | str]) -> tuple[int, int] | None:
    """Return what a regular file is told apart by. A terminal may be both input and output."""
    with suppress(OSError, ValueError, AttributeError):
        found = os.stat(place())
        if stat.S_ISREG(found.st_mode):
            return found.st_dev, found.st_ino
    return None


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
    """Plan a batch for each scope: tenants are never planned together."""
    by_scope: dict[Hashable, list[RequestToOrder]] = {}
    for request in requests:
        by_scope.setdefault(request.scope, []).append(request)
    for scope, members in by_scope.items():
        documents = [request.documents for request in members]
        known = [request.suffix_tokens for request in members if request.suffix_tokens is not None]
        lengths = Lengths(members[0].prefix_tokens, round(sum(known) / len(known)) if known else None)
        for ordering in orderer.order_batch(documents, scope=scope, lengths=lengths, max_wait=max_wait):
            yield members[ordering.index], ordering


@dataclass(frozen=True, slots=True)
class PromptFiles:
    """Prompts in both orders, for `vllm bench serve --dataset-name custom` and guidellm."""

    retrieval: IO[str]
    in_order: IO[str]
    output_tokens: int
    builder: PromptBuilder = field(default_factory=PromptBuilder)

    @classmethod
    @contextmanager
    def opened(cls, folder: Path, output_tokens: int) -> Iterator[PromptFiles]:
        with ExitStack() as stack:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                files = [stack.enter_context(open(folder / name, "w", encoding="utf-8")) for name in _FILES]
            except OSError as error:
                raise click.ClickException(f"--prompts {folder}: {error.strerror}: name another folder") from None
            yield cls(files[0], files[1], output_tokens)

    def retrieved(self, requests: Iterator[RequestToOrder]) -> Iterator[RequestToOrder]:
        for request in requests:
            self._write(self.retrieval, request, request.documents)
            yield request

    def ordered(self, request: RequestToOrder, ordering: Ordering[RequestDocument]) -> None:
        self._write(self.in_order, request, ordering.documents)

    def _write(self, file: IO[str], request: RequestToOrder, documents: Sequence[RequestDocument]) -> None:
        given = request.echo.get("output_tokens")
        tokens = self.output_tokens if given is None else given
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise _error(request, '"output_tokens" must be an integer of at least 1')
        texts = [Document(str(each.id), each.text) for each in documents]
        prompt = self.builder.build(_query(request), texts).text
        line = {"prompt": prompt, "output_tokens": tokens, "output_tokens_count": tokens}
        file.write(json.dumps(line) + "\n")


def _query(request: RequestToOrder) -> str:
    if not all(document.text for document in request.documents):
        raise _error(request, 'a document has no "text": a prompt consists of them')
    query: Any = next((request.echo[name] for name in _QUERIES if name in request.echo), None)
    if not isinstance(query, str):
        raise _error(request, 'add the question as "query": it ends the prompt')
    return query


def _error(request: RequestToOrder, problem: str) -> click.ClickException:
    return click.ClickException(f"--prompts: request {request.index} (counted from 0): {problem}")
