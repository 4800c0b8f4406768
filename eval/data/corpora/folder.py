"""A corpus kept in a folder as JSON lines, plain or gzipped."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus, CorpusError, CorpusQuestion
from ragorder.eval.data.retrieval import Retriever

__all__ = ["load_folder"]


@dataclass(frozen=True, slots=True)
class _CorpusLine:
    """One JSON object and where it stands."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, message: str) -> CorpusError:
        return CorpusError(f"{self.path}:{self.number}: {message}")

    def value(self, field: str) -> Any:
        if field not in self.fields:
            raise self.error(f"the field {field!r} is missing: add it")
        return self.fields[field]

    def string(self, field: str) -> str:
        value = self.value(field)
        if not isinstance(value, str):
            raise self.error(f"{field!r} must be a string, got {_kind(value)}: put it in quotes")
        return value

    def text(self, field: str) -> str:
        """A string that may be missing or null: then it is empty."""
        return "" if self.fields.get(field) is None else self.string(field)

    def identifier(self, field: str) -> str:
        value = self.string(field)
        if not value:
            raise self.error(f"{field!r} is empty: give every line its own identifier")
        return value

    def integer(self, field: str) -> int:
        value = self.value(field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{field!r} must be an integer, got {_kind(value)}")
        return value


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The documents to retrieve, and the position of each chunk id in them."""

    documents: Sequence[Document]
    positions: Mapping[str | int, int]


def load_folder(folder: Path, *, retriever: Retriever | None = None, top_k: int = 20) -> Corpus:
    """The corpus in `folder`, its questions in file order, with at most `top_k` documents per question.

    Files, each `.jsonl` or `.jsonl.gz`: `documents` (id, text, perhaps title), `questions` (id, question), optionally
    `chunks` (cid, doc, start, end in characters of the document's text, tokens) and `run_*` (id of a question, chunks:
    chunk ids best first). Without `chunks` each document is one chunk whose id is the document's. Without a retriever
    the folder's run gives the rankings.

    Raises CorpusError naming file and line for anything that cannot be read, ValueError for `top_k` < 1.
    """
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if not folder.is_dir():
        raise CorpusError(f"{folder}: not a folder: pass the folder that holds documents.jsonl and questions.jsonl")
    sources = _by_id(_read(_only(folder, "documents")))
    chunk_file = _find(folder, "chunks")
    chunks = _whole(sources) if chunk_file is None else _cut(sources, chunk_file)
    lines = _by_id(_read(_only(folder, "questions")))
    questions = [CorpusQuestion(id, line.string("question")) for id, line in lines.items()]
    if retriever is None:
        rankings = _run(_run_file(folder), lines, chunks, top_k)
    else:
        rankings = retriever.search(
            [document.text for document in chunks.documents], [question.text for question in questions], top_k
        )
    return Corpus(folder.resolve().name, chunks.documents, questions, rankings)


def _whole(sources: Mapping[str, _CorpusLine]) -> _Chunks:
    documents = [
        Document(f"{id}#0", line.string("text"), metadata={"source": id, "title": line.text("title")})
        for id, line in sources.items()
    ]
    return _Chunks(documents, {id: position for position, id in enumerate(sources)})


def _cut(sources: Mapping[str, _CorpusLine], path: Path) -> _Chunks:
    texts = {id: (line.string("text"), line.text("title")) for id, line in sources.items()}
    documents: list[Document] = []
    positions: dict[str | int, int] = {}
    counts = dict.fromkeys(sources, 0)
    for line in _read(path):
        cid = line.value("cid")
        if isinstance(cid, bool) or not isinstance(cid, (str, int)):
            raise line.error(f"'cid' must be a string or an integer, got {_kind(cid)}")
        if cid in positions:
            raise line.error(f"the chunk id {cid!r} occurs twice: give every chunk its own")
        source = line.identifier("doc")
        if source not in texts:
            raise line.error(f"there is no document {source!r}: add it to documents.jsonl or drop this chunk")
        text, title = texts[source]
        start, end, tokens = line.integer("start"), line.integer("end"), line.integer("tokens")
        if not 0 <= start < end <= len(text):
            raise line.error(
                f"start {start} and end {end} do not fit the {len(text)} characters of document {source!r}: "
                "use character offsets with 0 <= start < end <= length"
            )
        if tokens < 0:
            raise line.error(f"'tokens' must not be negative, got {tokens}")
        positions[cid] = len(documents)
        metadata = {"source": source, "title": title}
        documents.append(Document(f"{source}#{counts[source]}", text[start:end], tokens, metadata=metadata))
        counts[source] += 1
    return _Chunks(documents, positions)


def _run(path: Path, questions: Mapping[str, _CorpusLine], chunks: _Chunks, top_k: int) -> list[list[int]]:
    ranked: dict[str, list[int]] = {}
    for id, line in _by_id(_read(path)).items():
        if id not in questions:
            raise line.error(f"there is no question {id!r}: add it to questions.jsonl or drop this line")
        ranked[id] = _ranking(line, chunks.positions)[:top_k]
    for id, line in questions.items():
        if id not in ranked:
            raise line.error(f"question {id!r} has no line in {path.name}: add one, or pass a retriever")
    return [ranked[id] for id in questions]


def _ranking(line: _CorpusLine, positions: Mapping[str | int, int]) -> list[int]:
    cids = line.value("chunks")
    if not isinstance(cids, list):
        raise line.error(f"'chunks' must be a list of chunk ids, got {_kind(cids)}")
    ranking: dict[int, None] = {}
    for cid in cids:
        if isinstance(cid, bool) or not isinstance(cid, (str, int)) or cid not in positions:
            raise line.error(f"there is no chunk {cid!r}: rank only chunk ids of this folder")
        if positions[cid] in ranking:
            raise line.error(f"chunk {cid!r} is ranked twice: keep its best rank")
        ranking[positions[cid]] = None
    return list(ranking)


def _by_id(lines: Iterator[_CorpusLine]) -> dict[str, _CorpusLine]:
    known: dict[str, _CorpusLine] = {}
    for line in lines:
        id = line.identifier("id")
        if id in known:
            raise line.error(f"the id {id!r} occurs twice, first in line {known[id].number}: drop or rename one")
        known[id] = line
    return known


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


def _read(path: Path) -> Iterator[_CorpusLine]:
    number = 0
    found = False
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for raw in file:
                number += 1
                if raw.strip():
                    found = True
                    yield _parse(path, number, raw)
    except (OSError, EOFError, zlib.error) as error:
        raise CorpusError(f"{path}:{number + 1}: cannot be read ({error}): write or download the file again") from error
    if not found:
        raise CorpusError(f"{path}:1: the file holds no lines: add at least one")


def _parse(path: Path, number: int, raw: bytes) -> _CorpusLine:
    try:
        fields = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}:{number}: not JSON in UTF-8 ({error}): write one object a line") from error
    if not isinstance(fields, dict):
        raise CorpusError(f"{path}:{number}: must be an object, got {_kind(fields)}: write {{...}}")
    return _CorpusLine(path, number, fields)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")
