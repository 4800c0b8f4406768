"""Prompts of a corpus in token ids, with the neighbours of their documents."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ragorder.benchmarks.fusion.fusion_deviation.cells import DeviationCell
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.engines.prompts import SYSTEM_PROMPT

__all__ = ["CorpusPrompts", "FusedPrompt"]


@dataclass(frozen=True, slots=True)
class FusedPrompt:
    """`documents` are places in the corpus, in the prompt's order."""

    system: Sequence[int]
    documents: Sequence[int]
    question: Sequence[int]


class CorpusPrompts:
    """The questions of a corpus with as many documents as the cell wants, in an order of the seed's."""

    def __init__(self, corpus: Corpus, tokenizer: Any, cell: DeviationCell) -> None:
        self._corpus, self._tokenizer, self._cell = corpus, tokenizer, cell
        self._near: list[list[int]] | None = None

    def draw(self, count: int, seed: int) -> Iterator[FusedPrompt]:
        wanted, corpus = self._cell.documents, self._corpus
        known = [place for place, ranking in enumerate(corpus.rankings) if len(ranking) >= wanted]
        random.Random(seed).shuffle(known)
        for place in known[:count]:
            question = self._ids(corpus.questions[place].text)
            yield FusedPrompt(self._ids(SYSTEM_PROMPT), list(corpus.rankings[place])[:wanted], question)

    def document(self, place: int) -> list[int]:
        return self._ids(self._corpus.documents[place].text)[: self._cell.document_tokens]

    def neighbours(self, place: int) -> list[int]:
        """Of the whole corpus, the most similar one first. Raises ImportError, OSError, ValueError."""
        if self._near is None:
            from ragorder.kernels.preprocessing.neighbours import make_neighbours

            documents = self._corpus.documents
            choice = make_neighbours(self._cell.by)
            vectors = choice.vectors([document.text for document in documents])
            self._near = choice.nearest([document.id for document in documents], vectors, self._cell.neighbours)
        return self._near[place]

    def related(self) -> tuple[float, float]:
        """Over all questions: the share of the retrieved documents that have one of their neighbours among the others,
        and the share of their neighbours that are among these (FusionRAG, Figure 7a). Raises as `neighbours`."""
        wanted = self._cell.documents
        sets = [list(ranking)[:wanted] for ranking in self._corpus.rankings if len(ranking) >= wanted]
        found = [
            [near in retrieved for near in self.neighbours(place)]
            for retrieved in sets
            for place in retrieved
            if self.neighbours(place)
        ]
        return (fmean(map(any, found)), fmean(near for each in found for near in each)) if found else (0.0, 0.0)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
