"""A corpus with questions and their retrieved documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ragorder.document import Document

__all__ = ["Corpus", "CorpusError", "CorpusQuestion"]


class CorpusError(ValueError):
    """A corpus cannot be read. The message names the file, the line and what to change."""


@dataclass(frozen=True, slots=True)
class CorpusQuestion:
    """`answers`: all accepted ones, if they are known."""

    id: str
    text: str
    answers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Corpus:
    """`rankings[i]` are positions in `documents`, those retrieved for `questions[i]`, best first."""

    name: str
    documents: Sequence[Document]
    questions: Sequence[CorpusQuestion]
    rankings: Sequence[Sequence[int]]
