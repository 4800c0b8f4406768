"""Prompts of a corpus as tokens: of a document's length, the same for the same document."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus

__all__ = ["ANSWER_TOKENS", "QUESTION_TOKENS", "Prompts"]

QUESTION_TOKENS = 32
ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prompts:
    """The documents of each request, by rank, and their tokens."""

    documents: Sequence[Sequence[Document]]
    first: dict[str, int]
    tokens: int

    @classmethod
    def of(cls, corpus: Corpus, count: int, *, top_k: int, seed: int) -> Prompts:
        """Of `count` questions, drawn without repetition as far as there are enough."""
        draw = random.Random(f"prompts {seed}")
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += draw.sample(range(len(corpus.questions)), min(count - len(chosen), len(corpus.questions)))
        documents = [[corpus.documents[place] for place in corpus.rankings[each][:top_k]] for each in chosen]
        first: dict[str, int] = {}
        tokens = 0
        for document in (each for request in documents for each in request):
            if document.key not in first:
                first[document.key] = tokens
                tokens += document.token_count
        return cls(documents, first, tokens)

    @classmethod
    def none(cls, count: int) -> Prompts:
        """For systems that only count requests."""
        return cls([()] * count, {}, 0)

    @property
    def mean_tokens(self) -> float:
        """Of a prompt with its answer."""
        lengths = [sum(each.token_count for each in request) for request in self.documents]
        return sum(lengths) / len(lengths) + QUESTION_TOKENS + ANSWER_TOKENS

    def token_ids(self, number: int, documents: Sequence[Document]) -> list[int]:
        """Of the documents in this order, and of the question, which no other request has."""
        found: list[int] = []
        for document in documents:
            begin = self.first[document.key]
            found += range(begin, begin + document.token_count)
        begin = self.tokens + number * QUESTION_TOKENS
        return [*found, *range(begin, begin + QUESTION_TOKENS)]
