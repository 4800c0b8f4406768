"""Prompts in both orders, as files that foreign benchmarks send to a server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import click

from ragorder.cli.request_lines import RequestDocument, RequestToOrder
from ragorder.document import Document
from ragorder.ordering import Ordering
from ragorder.prompt import PromptBuilder

__all__ = ["ORDERED", "RETRIEVAL", "PromptFiles"]

RETRIEVAL, ORDERED = "retrieval.jsonl", "ordered.jsonl"
_QUERIES = ("query", "question")


class PromptFiles:
    """The files `retrieval.jsonl` and `ordered.jsonl` of a folder, which is made if it is not there.

    A line has the names of `vllm bench serve --dataset-name custom` and of guidellm: "prompt", and the length of its
    answer as "output_tokens" and "output_tokens_count". Requests that say "output_tokens" have a length of their own.
    """

    def __init__(self, folder: Path, output_tokens: int) -> None:
        self._folder = folder
        self._output_tokens = output_tokens
        self._builder = PromptBuilder()
        self._open = ExitStack()

    def __enter__(self) -> PromptFiles:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._retrieval = self._file(RETRIEVAL)
            self._ordered = self._file(ORDERED)
        except OSError as error:
            self._open.close()
            raise click.ClickException(f"--prompts {self._folder}: {error.strerror}: name another folder") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def retrieved(self, requests: Iterator[RequestToOrder]) -> Iterator[RequestToOrder]:
        """The requests, each written in retrieval order as it passes. Raises ClickException if one has no prompt."""
        for request in requests:
            self._write(self._retrieval, request, request.documents)
            yield request

    def ordered(self, request: RequestToOrder, ordering: Ordering[RequestDocument]) -> None:
        self._write(self._ordered, request, ordering.documents)

    def _file(self, name: str) -> IO[str]:
        return self._open.enter_context(open(self._folder / name, "w", encoding="utf-8"))

    def _write(self, file: IO[str], request: RequestToOrder, documents: Sequence[RequestDocument]) -> None:
        tokens = request.echo.get("output_tokens", self._output_tokens)
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise _error(request, '"output_tokens" must be an integer of at least 1')
        given = [Document(str(each.id), each.text) for each in documents]
        prompt = self._builder.build(_query(request), given).text
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
