"""A trace: the requests of one run, whatever they come from."""

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
    """A question and the documents that were retrieved for it, best first."""

    question: str
    documents: list[Document]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `corpus_tokens` is the length of all documents that there are, `in_flight` how many
    requests are being served at any time, `order` "data" or "random"."""

    name: str
    requests: Sequence[TraceRequest]
    corpus_tokens: int
    in_flight: int = 1
    order: str = "data"


def trace_of_workload(workload: Workload, limit: int | None = None) -> Trace:
    """The requests of a synthetic workload, the first `limit` of them."""
    documents = workload.documents
    requests = [
        TraceRequest(f"What do they say about number {number}?", [documents[d] for d in ranking])
        for number, ranking in enumerate(workload.rankings[:limit])
    ]
    return Trace(workload.name, requests, _tokens(documents), workload.in_flight)


def trace_of_corpus(
    corpus: Corpus, *, top_k: int, order: str, seed: int, limit: int | None = None, repeat: bool = False
) -> Trace:
    """The questions of a corpus, in its own ("data") or in "random" order, with their `top_k` documents: the first
    `limit` of them. With `repeat` the questions are asked again from the first one until there are `limit` requests.

    Raises CorpusError if the corpus ranks fewer documents than that.
    """
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
