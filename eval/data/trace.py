"""Traces: the requests of one run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Literal, Protocol, TypeVar

from ragorder.common.corpus import CorpusError
from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus
from ragorder.eval.data.workloads import Workload

QuestionOrder = Literal["data", "random", "recurring", "topics"]
"""Of a corpus' questions: as given; shuffled; 300 of them again and again, by Zipf's law; or 40 topics of five
questions that share documents, shuffled."""

_RECURRING, _RECURRENCES = 300, 1000
_TOPICS, _QUESTIONS = 40, 5


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A question and its retrieved documents, best first."""

    question: str
    documents: list[Document]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `corpus_tokens` is the length of all documents, `in_flight` the number of
    concurrent requests."""

    name: str
    requests: Sequence[TraceRequest]
    corpus_tokens: int
    in_flight: int = 1
    order: QuestionOrder = "data"


def trace_of_workload(workload: Workload, limit: int | None = None) -> Trace:
    documents = workload.documents
    requests = [
        TraceRequest(f"What do they say about number {number}?", [documents[d] for d in ranking])
        for number, ranking in enumerate(workload.rankings[:limit])
    ]
    return Trace(workload.name, requests, _tokens(documents), workload.in_flight)


def trace_of_corpus(
    corpus: Corpus, *, top_k: int, order: QuestionOrder, seed: int, limit: int | None = None, repeat: bool = False
) -> Trace:
    """The first `limit` questions in that order; with `repeat` again from the first one. Raises
    CorpusError if the corpus ranks fewer than `top_k` documents."""
    check_ranked(corpus, top_k)
    requests = [
        TraceRequest(question.text, [corpus.documents[d] for d in ranking[:top_k]])
        for question, ranking in zip(corpus.questions, corpus.rankings, strict=True)
    ]
    requests = in_order(requests, order, seed, limit if limit is not None and repeat else _RECURRENCES)
    if repeat and limit is not None:
        requests = list(islice(cycle(requests), limit))
    return Trace(corpus.name, requests[:limit], _tokens(corpus.documents), order=order)


def check_ranked(corpus: Corpus, top_k: int) -> None:
    """Raises CorpusError if the corpus ranks fewer than `top_k` documents."""
    ranked = max((len(ranking) for ranking in corpus.rankings), default=0)
    if ranked < top_k:
        raise CorpusError(
            f"{corpus.name}: its retrieval run ranks {ranked} documents a question: lower --top-k ({top_k})"
        )


class _Asked(Protocol):
    @property
    def documents(self) -> Sequence[Document]: ...


A = TypeVar("A", bound=_Asked)


def in_order(requests: Sequence[A], order: QuestionOrder, seed: int, recurrences: int = _RECURRENCES) -> list[A]:
    """Return the requests of a corpus as they are asked, recurring ones `recurrences` times in all."""
    rng = random.Random(seed)
    if order == "random":
        shuffled = list(requests)
        rng.shuffle(shuffled)
        return shuffled
    if order == "recurring":
        asked = rng.sample(requests, min(_RECURRING, len(requests)))
        weights = [1 / place for place in range(1, len(asked) + 1)]
        return rng.choices(asked, weights, k=recurrences)
    if order == "topics":
        return _by_topic(requests, rng)
    return list(requests)


def _by_topic(requests: Sequence[A], rng: random.Random) -> list[A]:
    """Each topic is a question and those that share most documents with it."""
    left = rng.sample(requests, len(requests))
    chosen: list[A] = []
    while left and len(chosen) < _TOPICS * _QUESTIONS:
        about = {document.key for document in left[0].documents}
        left.sort(key=lambda request: -len(about.intersection(document.key for document in request.documents)))
        chosen += left[:_QUESTIONS]
        left = rng.sample(left[_QUESTIONS:], len(left[_QUESTIONS:]))
    return rng.sample(chosen, len(chosen))


def _tokens(documents: Sequence[Document]) -> int:
    return sum(document.token_count for document in documents)
