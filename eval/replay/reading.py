"""Logs of requests: JSON lines, read strictly, in ragorder's own format or as other software exports them.

Of the own format only time and documents are required. Fields that `RequestLine` does not have are counted in
`Log.passed_over`."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragorder.common.jsonl import JSONLines, decode, problem_of
from ragorder.common.request_lines import Length, PositiveLength, RequestLine, UnreadFields, seconds_of
from ragorder.eval.replay.formats import FORMATS, ExportLine
from ragorder.eval.replay.formats.base import Step
from ragorder.eval.replay.log import Log, LogBuilder, LogError

if TYPE_CHECKING:
    from ragorder.eval.running.load import Progress

_MAX_LINE_BYTES = 1 << 24


class DefaultLengths(BaseModel):
    """Lengths where the log gives none."""

    model_config = ConfigDict(frozen=True)

    document_tokens: Length = Field(default=256, description="Length of a document.")
    prefix_tokens: Length = Field(default=64, description="Tokens before the documents (system prompt).")
    suffix_tokens: PositiveLength = Field(default=20, description="Tokens after the documents (question, template).")
    output_tokens: Length = Field(default=32, description="Tokens of an answer.")


def read_log(
    source: str | Path | IO[bytes],
    *,
    format: str = "ragorder",
    lengths: DefaultLengths | None = None,
    top_k: int | None = None,
    limit: int | None = None,
    progress: Progress | None = None,
) -> Log:
    """The first `limit` requests of a log in one of `FORMATS`, each with its first `top_k` documents. Raises LogError
    naming file, line and what to change; it quotes nothing of the line."""
    if format not in FORMATS:
        raise LogError(f"there is no format of that name: choose {', '.join(FORMATS)}")
    exported = FORMATS[format]
    lines = JSONLines(
        source, error=LogError, example=exported.EXAMPLE, max_line_bytes=_MAX_LINE_BYTES, progress=progress
    )
    reader = _Reader(lengths or DefaultLengths(), top_k, limit)
    for number, line in _lines(lines, exported):
        try:
            for step in line.steps():
                reader.add(step)
        except ValueError as error:
            raise lines.error(number, str(error)) from None
        if len(reader.builder) == limit:
            break
    reader.finish()
    if not len(reader.builder):
        unread = "; ".join(f"{count:,} {reason}" for reason, count in reader.reasons.items())
        raise LogError(f"{lines.name}: no requests in it: {unread or f'a line looks like {exported.EXAMPLE}'}")
    return reader.builder.build(
        Path(lines.name).name,
        reader.unread.lines,
        estimated_lengths=reader.estimated_lengths,
        assumed_lengths=reader.assumed_lengths,
    )


def _lines(lines: JSONLines, exported: type[ExportLine]) -> Iterator[tuple[int, ExportLine]]:
    source = iter(lines)
    for number, first in source:
        start = first.strip()
        if start.startswith(b"[{") or start in (b"[", b"{"):
            kind = "a JSON array" if start.startswith(b"[") else "JSON over several lines"
            jq = ".[]" if start.startswith(b"[") else "."
            raise lines.error(number, f"{kind}: write one object a line (jq -c '{jq}' does)")
        everything = chain([(number, first)], source)
        if exported.IS_ROW and b"," in start and not start.startswith(b"{"):
            yield from _rows(lines, everything, exported)
        else:
            yield from ((number, lines.validate(exported, number, line)) for number, line in everything)


def _rows(
    lines: JSONLines, source: Iterator[tuple[int, bytes]], exported: type[ExportLine]
) -> Iterator[tuple[int, ExportLine]]:
    """The rows of a table in CSV: numbers are texts there, and some writers make each cell a JSON text."""
    number = 0

    def texts() -> Iterator[str]:
        nonlocal number
        for number, line in source:  # noqa: B007
            yield line.decode("utf-8")

    csv.field_size_limit(_MAX_LINE_BYTES)
    try:
        for row in csv.DictReader(texts(), strict=True):
            cells = {name: _unquoted(cell) for name, cell in row.items() if name and cell}
            yield number, exported.model_validate(cells, strict=False)
    except ValidationError as error:
        raise lines.error(number, problem_of(error, cells)) from None
    except UnicodeDecodeError:
        raise lines.error(number, "not UTF-8") from None
    except csv.Error as error:
        raise lines.error(number, f"not CSV ({error})") from None


def _unquoted(cell: str) -> Any:
    if cell.startswith('"'):
        with suppress(ValueError):
            return decode(cell.encode())
    return cell


class _Request(NamedTuple):
    time_s: float
    documents: list[Hashable]
    tokens: list[int]
    lengths: dict[str, Any]
    estimated: int
    assumed: int


class _Reader:
    """Of retrievals inside one another, as of a reranking retriever and the database that it asks, the outermost one
    counts. It ends last, so those of traces are kept until the end."""

    def __init__(self, lengths: DefaultLengths, top_k: int | None, limit: int | None) -> None:
        self.builder = LogBuilder()
        self.unread = UnreadFields()
        self.reasons: Counter[str] = Counter()
        self.estimated_lengths = self.assumed_lengths = 0
        # Attributes of a pydantic model are read slowly, and these at every line.
        self._lengths = lengths.model_dump()
        self._top_k = top_k
        self._limit = limit
        self._parents: dict[str, str] = {}
        self._kept: list[tuple[str, _Request]] = []

    def add(self, step: Step) -> None:
        """Raises ValueError for lengths that contradict each other."""
        if step.id and step.parent:
            self._parents[step.id] = step.parent
        if step.request is None:
            self.reasons.update([step.unread] if step.unread else [])
        elif step.id:
            self._kept.append((step.id, self._read(step.request)))
        else:
            self._append(self._read(step.request))

    def finish(self) -> None:
        retrievals = {id for id, _ in self._kept}
        for id, request in self._kept:
            if not self._is_within(id, retrievals):
                self._append(request)

    def _is_within(self, id: str, retrievals: Collection[str]) -> bool:
        seen = {id}
        while (id := self._parents.get(id, "")) and id not in seen:
            if id in retrievals:
                return True
            seen.add(id)
        return False

    def _read(self, line: RequestLine) -> _Request:
        default = self._lengths
        self.unread.add(line)
        tokens, estimated, assumed = line.lengths(default["document_tokens"])
        prefix_tokens = default["prefix_tokens"] if line.prefix_tokens is None else line.prefix_tokens
        suffix_tokens = line.tokens_after_documents(prefix_tokens + sum(tokens))
        lengths = {
            "tenant": line.tenant,
            "prefix_tokens": prefix_tokens,
            "suffix_tokens": default["suffix_tokens"] if suffix_tokens is None else suffix_tokens,
            "output_tokens": default["output_tokens"] if line.output_tokens is None else line.output_tokens,
        }
        documents, whole = line.names[: self._top_k], [int(each) for each in tokens[: self._top_k]]
        return _Request(seconds_of(line.time or 0), documents, whole, lengths, estimated, assumed)

    def _append(self, request: _Request) -> None:
        if len(self.builder) == self._limit:
            return
        self.estimated_lengths += request.estimated
        self.assumed_lengths += request.assumed
        self.builder.add(request.time_s, request.documents, request.tokens, **request.lengths)
