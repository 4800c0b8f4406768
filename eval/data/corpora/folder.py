"""A corpus in a folder of JSON lines, plain or gzipped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ragorder.common.corpus import (
    CorpusError,
    Located,
    NamedLine,
    by_id,
    find_file,
    matching_files,
    only_file,
    read_passages,
)
from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus, CorpusQuestion
from ragorder.eval.data.retrieval import Retriever


class QuestionLine(NamedLine):
    question: str
    answers: list[str] | None = None
    supporting: list[str] | None = None


class RankingLine(NamedLine):
    """The chunk ids retrieved for a question, best first."""

    chunks: list[str | int]


def load_folder(folder: Path, *, retriever: Retriever | None = None, top_k: int = 20) -> Corpus:
    """The corpus in `folder`, with at most `top_k` documents a question; docs/corpora.md has the files. Without a
    retriever the folder's run ranks. Raises CorpusError naming file and line, ValueError for `top_k` < 1."""
    if top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    passages = read_passages(folder)
    documents = [
        Document(each.id, each.text, each.tokens, metadata={"source": each.source, "title": each.title})
        for each in passages
    ]
    lines = by_id(only_file(folder, "questions"), QuestionLine)
    questions = [
        CorpusQuestion(id, line.question, line.answers or (), line.supporting or ())
        for id, line in ((id, located.fields) for id, located in lines.items())
    ]
    if retriever is None:
        positions = {each.key: position for position, each in enumerate(passages)}
        rankings = _run(_run_file(folder), lines, positions, top_k)
    else:
        rankings = retriever.search(
            [document.text for document in documents], [question.text for question in questions], top_k
        )
    return Corpus(folder.resolve().name, documents, questions, rankings)


def _run(
    path: Path, questions: Mapping[str, Located[QuestionLine]], positions: Mapping[str | int, int], top_k: int
) -> list[list[int]]:
    ranked: dict[str, list[int]] = {}
    for id, line in by_id(path, RankingLine).items():
        if id not in questions:
            raise line.error(f"there is no question {id!r}: add it to questions.jsonl or drop this line")
        ranked[id] = _ranking(line, positions)[:top_k]
    for id, question in questions.items():
        if id not in ranked:
            raise question.error(f"question {id!r} has no line in {path.name}: add one, or pass a retriever")
    return [ranked[id] for id in questions]


def _ranking(line: Located[RankingLine], positions: Mapping[str | int, int]) -> list[int]:
    ranking: dict[int, None] = {}
    for cid in line.fields.chunks:
        if cid not in positions:
            raise line.error(f"there is no chunk {cid!r}: rank only chunk ids of this folder")
        if positions[cid] in ranking:
            raise line.error(f"chunk {cid!r} is ranked twice: keep its best rank")
        ranking[positions[cid]] = None
    return list(ranking)


def _run_file(folder: Path) -> Path:
    preferred = find_file(folder, "run_top20")
    if preferred is not None:
        return preferred
    paths = matching_files(folder, "run_*")
    if not paths:
        raise CorpusError(f"{folder}: there is no run_*.jsonl or run_*.jsonl.gz: add one, or pass a retriever")
    if len(paths) > 1:
        raise CorpusError(f"{paths[1]}: there are several runs, {paths[0].name} too: keep one, or pass a retriever")
    return paths[0]
