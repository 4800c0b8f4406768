"""A corpus in a folder of JSON lines, plain or gzipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from ragorder.common.jsonl import JSONLines
from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus, CorpusError, CorpusQuestion
from ragorder.eval.data.retrieval import Retriever

Id = Annotated[str, Field(min_length=1)]


class CorpusLine(BaseModel):
    model_config = ConfigDict(strict=True)


class DocumentLine(CorpusLine):
    id: Id
    text: str
    title: str | None = None


class QuestionLine(CorpusLine):
    id: Id
    question: str
    answers: list[str] | None = None
    supporting: list[str] | None = None


class ChunkLine(CorpusLine):
    """A part of a document, in characters of its text."""

    cid: str | int
    doc: Id
    start: int
    end: int
    tokens: int = Field(ge=0)


class RankingLine(CorpusLine):
    """The chunk ids retrieved for a question, best first."""

    id: Id
    chunks: list[str | int]


L = TypeVar("L", bound=CorpusLine)
N = TypeVar("N", DocumentLine, QuestionLine, RankingLine)


@dataclass(frozen=True, slots=True)
class _Located(Generic[L]):
    fields: L
    number: int
    error: Callable[[str], Exception]


@dataclass(frozen=True, slots=True)
class _Chunks:
    documents: Sequence[Document]
    positions: Mapping[str | int, int]


def load_folder(folder: Path, *, retriever: Retriever | None = None, top_k: int = 20) -> Corpus:
    """The corpus in `folder`, with at most `top_k` documents a question; docs/corpora.md has the files. Without a
    retriever the folder's run ranks. Raises CorpusError naming file and line, ValueError for `top_k` < 1."""
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if not folder.is_dir():
        raise CorpusError(f"{folder}: not a folder: pass the folder that holds documents.jsonl and questions.jsonl")
    sources = _by_id(_only(folder, "documents"), DocumentLine)
    chunk_file = _find(folder, "chunks")
    chunks = _whole(sources) if chunk_file is None else _cut(sources, chunk_file)
    lines = _by_id(_only(folder, "questions"), QuestionLine)
    questions = [
        CorpusQuestion(id, line.question, line.answers or (), line.supporting or ())
        for id, line in ((id, located.fields) for id, located in lines.items())
    ]
    if retriever is None:
        rankings = _run(_run_file(folder), lines, chunks, top_k)
    else:
        rankings = retriever.search(
            [document.text for document in chunks.documents], [question.text for question in questions], top_k
        )
    return Corpus(folder.resolve().name, chunks.documents, questions, rankings)


def _whole(sources: Mapping[str, _Located[DocumentLine]]) -> _Chunks:
    documents = [
        Document(f"{id}#0", line.fields.text, metadata={"source": id, "title": line.fields.title or ""})
        for id, line in sources.items()
    ]
    return _Chunks(documents, {id: position for position, id in enumerate(sources)})


def _cut(sources: Mapping[str, _Located[DocumentLine]], path: Path) -> _Chunks:
    documents: list[Document] = []
    positions: dict[str | int, int] = {}
    counts = dict.fromkeys(sources, 0)
    for line in _read(path, ChunkLine):
        chunk = line.fields
        if chunk.cid in positions:
            raise line.error(f"the chunk id {chunk.cid!r} occurs twice: give every chunk its own")
        if chunk.doc not in sources:
            raise line.error(f"there is no document {chunk.doc!r}: add it to documents.jsonl or drop this chunk")
        source = sources[chunk.doc].fields
        if not 0 <= chunk.start < chunk.end <= len(source.text):
            raise line.error(
                f"start {chunk.start} and end {chunk.end} do not fit the {len(source.text)} characters of document "
                f"{chunk.doc!r}: use character offsets with 0 <= start < end <= length"
            )
        positions[chunk.cid] = len(documents)
        metadata = {"source": chunk.doc, "title": source.title or ""}
        id, text = f"{chunk.doc}#{counts[chunk.doc]}", source.text[chunk.start : chunk.end]
        documents.append(Document(id, text, chunk.tokens, metadata=metadata))
        counts[chunk.doc] += 1
    return _Chunks(documents, positions)


def _run(path: Path, questions: Mapping[str, _Located[QuestionLine]], chunks: _Chunks, top_k: int) -> list[list[int]]:
    ranked: dict[str, list[int]] = {}
    for id, line in _by_id(path, RankingLine).items():
        if id not in questions:
            raise line.error(f"there is no question {id!r}: add it to questions.jsonl or drop this line")
        ranked[id] = _ranking(line, chunks.positions)[:top_k]
    for id, question in questions.items():
        if id not in ranked:
            raise question.error(f"question {id!r} has no line in {path.name}: add one, or pass a retriever")
    return [ranked[id] for id in questions]


def _ranking(line: _Located[RankingLine], positions: Mapping[str | int, int]) -> list[int]:
    ranking: dict[int, None] = {}
    for cid in line.fields.chunks:
        if cid not in positions:
            raise line.error(f"there is no chunk {cid!r}: rank only chunk ids of this folder")
        if positions[cid] in ranking:
            raise line.error(f"chunk {cid!r} is ranked twice: keep its best rank")
        ranking[positions[cid]] = None
    return list(ranking)


def _by_id(path: Path, model: type[N]) -> dict[str, _Located[N]]:
    known: dict[str, _Located[N]] = {}
    for line in _read(path, model):
        id = line.fields.id
        if id in known:
            raise line.error(f"the id {id!r} occurs twice, first in line {known[id].number}: drop or rename one")
        known[id] = line
    return known


def _read(path: Path, model: type[L]) -> Iterator[_Located[L]]:
    lines = JSONLines(path, error=CorpusError)
    number = 0
    for number, fields in lines.read(model):
        yield _Located(fields, number, partial(lines.error, number))
    if not number:
        raise lines.error(1, "the file holds no lines: add at least one")


def _only(folder: Path, stem: str) -> Path:
    path = _find(folder, stem)
    if path is None:
        raise CorpusError(f"{folder / stem}.jsonl: the file is missing: add {stem}.jsonl or {stem}.jsonl.gz")
    return path


def _run_file(folder: Path) -> Path:
    preferred = _find(folder, "run_top20")
    if preferred is not None:
        return preferred
    paths = _matches(folder, "run_*")
    if not paths:
        raise CorpusError(f"{folder}: there is no run_*.jsonl or run_*.jsonl.gz: add one, or pass a retriever")
    if len(paths) > 1:
        raise CorpusError(f"{paths[1]}: there are several runs, {paths[0].name} too: keep one, or pass a retriever")
    return paths[0]


def _find(folder: Path, stem: str) -> Path | None:
    paths = _matches(folder, stem)
    if len(paths) > 1:
        raise CorpusError(f"{paths[1]}: the folder also holds {paths[0].name}: keep one of the two")
    return paths[0] if paths else None


def _matches(folder: Path, stem: str) -> list[Path]:
    return sorted([*folder.glob(f"{stem}.jsonl"), *folder.glob(f"{stem}.jsonl.gz")])
