"""Documents of a corpus folder, as JSON lines (docs/corpora.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ragorder.common.jsonl import JSONLines
from ragorder.errors import RagorderError

Id = Annotated[str, Field(min_length=1)]


class CorpusError(RagorderError, ValueError):
    """A corpus cannot be read. The message names the file, the line and what to change."""


class CorpusLine(BaseModel):
    model_config = ConfigDict(strict=True)


class NamedLine(CorpusLine):
    id: Id


class DocumentLine(NamedLine):
    text: str
    title: str | None = None


class ChunkLine(CorpusLine):
    """A part of a document, in characters of its text."""

    cid: str | int
    doc: Id
    start: int
    end: int
    tokens: int = Field(ge=0)


class Passage(NamedTuple):
    """A document or a part of one: `key` names it in a run, `id` in a prompt; `source` is the document's id."""

    key: str | int
    id: str
    text: str
    source: str
    title: str
    tokens: int | None = None


L = TypeVar("L", bound=CorpusLine)
N = TypeVar("N", bound=NamedLine)


@dataclass(frozen=True, slots=True)
class Located(Generic[L]):
    fields: L
    number: int
    error: Callable[[str], Exception]


def read_passages(folder: Path) -> Sequence[Passage]:
    """Return the parts in `chunks.jsonl`, or whole documents without this file. Raises CorpusError."""
    if not folder.is_dir():
        raise CorpusError(f"{folder}: not a folder: pass the folder that holds documents.jsonl and questions.jsonl")
    sources = by_id(only_file(folder, "documents"), DocumentLine)
    chunks = find_file(folder, "chunks")
    return _whole(sources) if chunks is None else _cut(sources, chunks)


def _whole(sources: Mapping[str, Located[DocumentLine]]) -> Sequence[Passage]:
    return [Passage(id, f"{id}#0", line.fields.text, id, line.fields.title or "") for id, line in sources.items()]


def _cut(sources: Mapping[str, Located[DocumentLine]], path: Path) -> Sequence[Passage]:
    passages: dict[str | int, Passage] = {}
    counts = dict.fromkeys(sources, 0)
    for line in read_lines(path, ChunkLine):
        chunk = line.fields
        if chunk.cid in passages:
            raise line.error(f"the chunk id {chunk.cid!r} occurs twice: give every chunk its own")
        if chunk.doc not in sources:
            raise line.error(f"there is no document {chunk.doc!r}: add it to documents.jsonl or drop this chunk")
        source = sources[chunk.doc].fields
        if not 0 <= chunk.start < chunk.end <= len(source.text):
            raise line.error(
                f"start {chunk.start} and end {chunk.end} do not fit the {len(source.text)} characters of document "
                f"{chunk.doc!r}: use character offsets with 0 <= start < end <= length"
            )
        id, text = f"{chunk.doc}#{counts[chunk.doc]}", source.text[chunk.start : chunk.end]
        passages[chunk.cid] = Passage(chunk.cid, id, text, chunk.doc, source.title or "", chunk.tokens)
        counts[chunk.doc] += 1
    return list(passages.values())


def by_id(path: Path, model: type[N], *, example: str = "") -> dict[str, Located[N]]:
    known: dict[str, Located[N]] = {}
    for line in read_lines(path, model, example=example):
        id = line.fields.id
        if id in known:
            raise line.error(f"the id {id!r} occurs twice, first in line {known[id].number}: drop or rename one")
        known[id] = line
    return known


def read_lines(path: Path, model: type[L], *, example: str = "") -> Iterator[Located[L]]:
    lines = JSONLines(path, error=CorpusError, example=example)
    number = 0
    for number, fields in lines.read(model):
        yield Located(fields, number, partial(lines.error, number))
    if not number:
        raise lines.error(1, "the file holds no lines: add at least one")


def only_file(folder: Path, stem: str) -> Path:
    path = find_file(folder, stem)
    if path is None:
        raise CorpusError(f"{folder / stem}.jsonl: the file is missing: add {stem}.jsonl or {stem}.jsonl.gz")
    return path


def find_file(folder: Path, stem: str) -> Path | None:
    paths = matching_files(folder, stem)
    if len(paths) > 1:
        raise CorpusError(f"{paths[1]}: the folder also holds {paths[0].name}: keep one of the two")
    return paths[0] if paths else None


def matching_files(folder: Path, stem: str) -> list[Path]:
    return sorted([*folder.glob(f"{stem}.jsonl"), *folder.glob(f"{stem}.jsonl.gz")])
