"""Traces: the requests of one run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from ragorder.document import Document
from ragorder.eval.data.corpora.base import Corpus, CorpusError
from ragorder.eval.data.workloads import Workload

__all__ = ["Trace", "TraceRequest", "trace_of_corpus", "trace_of_workload"]


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A question and its retrieved documents, best first."""

    question: str
    documents: list[Document]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `corpus_tokens` is the length of all documents, `in_flight` the number of
    concurrent requests, `order` "data" or "random"."""

    name: str
    requests: Sequence[TraceRequest]
    corpus_tokens: int
    in_flight: int = 1
    order: str = "data"


def trace_of_workload(workload: Workload, limit: int | None = None) -> Trace:
    documents = workload.documents
    requests = [
        TraceRequest(f"What do they say about number {number}?", [documents[d] for d in ranking])
        for number, ranking in enumerate(workload.rankings[:limit])
    ]
    return Trace(workload.name, requests, _tokens(documents), workload.in_flight)


def trace_of_corpus(
    corpus: Corpus, *, top_k: int, order: str, seed: int, limit: int | None = None, repeat: bool = False
) -> Trace:
    """The first `limit` questions in "data" or "random" order; with `repeat` again from the first one. Raises
    CorpusError if the corpus ranks fewer than `top_k` documents."""
    ranked = max((len(ranking) for ranking in corpus.rankings), default=0)
    if ranked < top_k:
        raise CorpusError(
            f"{corpus.name}: its retrieval run ranks {ranked} documents a question: lower --top-k ({top_k})"
        )
    requests = [
        TraceRequest(question.text, [corpus.documents[d] for d in ranking[:top_k]])
        for question, ranking in zip(corpus.questions, corpus.rankings, strict=True)
    ]
    if order == "random":
        random.Random(seed).shuffle(requests)
    if repeat and limit is not None:
        requests = list(islice(cycle(requests), limit))
    return Trace(corpus.name, requests[:limit], _tokens(corpus.documents), order=order)


def _tokens(documents: Sequence[Document]) -> int:
    return sum(document.token_count for document in documents)
