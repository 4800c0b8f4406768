"""A corpus with questions and their retrieved documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragorder.document import Document


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    """`answers` are all accepted ones, `supporting` the ids of the documents that answer it; empty: not known."""

    id: str
    text: str
    answers: Sequence[str] = ()
    supporting: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Corpus:
    """`rankings[i]` are positions in `documents`, those retrieved for `questions[i]`, best first."""

    name: str
    documents: Sequence[Document]
    questions: Sequence[CorpusQuestion]
    rankings: Sequence[Sequence[int]]
