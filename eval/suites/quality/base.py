"""Questions with known answers and retrieved documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ragorder.document import Document

__all__ = ["DatasetName", "GradedQuestion", "QualityError", "QuestionDocuments", "Reading"]

DatasetName = Literal["hotpotqa", "musique", "2wikimultihopqa", "triviaqa", "nq", "corpus"]


class QualityError(ValueError):
    """Quality cannot be measured. The message says what to change."""


@dataclass(frozen=True, slots=True)
class GradedQuestion:
    """`answers` are all accepted ones, `documents` in retrieval order, `gold` the ids of supporting documents."""

    id: str
    text: str
    answers: tuple[str, ...]
    documents: tuple[Document, ...]
    gold: tuple[str, ...] = ()


class QuestionDocuments:
    """The documents of one question, each once, and which of them are gold."""

    def __init__(self) -> None:
        self._documents: dict[str, Document] = {}
        self._gold: dict[str, None] = {}

    def add(self, document: Document, *, gold: bool) -> None:
        self._documents[document.id] = document
        if gold:
            self._gold[document.id] = None

    def question(self, id: str, text: str, answers: Iterable[str]) -> GradedQuestion:
        return GradedQuestion(
            id, text, tuple(dict.fromkeys(answers)), tuple(self._documents.values()), tuple(self._gold)
        )


class Reading:
    """Documents of a data set while it is read: one for each title and text, the second text of a title as "title (2)".

    `evidence` is TriviaQA's folder, `aliases` 2WikiMultiHopQA's further answers. `passed_over` counts unusable data by
    reason.
    """

    def __init__(
        self, *, document_words: int | None = None, evidence: Path | None = None, aliases: Path | None = None
    ) -> None:
        self.evidence = evidence
        self.aliases = aliases
        self.passed_over: Counter[str] = Counter()
        self._words = document_words
        self._known: dict[tuple[str, str], Document] = {}
        self._names: set[str] = set()
        self._numbers: dict[str, int] = {}

    def document(self, title: str, text: str) -> Document:
        title = " ".join(title.split()) or "untitled"
        text = self._cut(text.strip())
        document = self._known.get((title, text))
        if document is None:
            metadata = {"title": title, "source": title}
            document = self._known[title, text] = Document(self._name(title), text, metadata=metadata)
        return document

    def _cut(self, text: str) -> str:
        words = text.split()
        return text if self._words is None or len(words) <= self._words else " ".join(words[: self._words])

    def _name(self, title: str) -> str:
        name, number = title, self._numbers.get(title, 1)
        while name in self._names:
            number += 1
            name = f"{title} ({number})"
        self._numbers[title] = number
        self._names.add(name)
        return name
