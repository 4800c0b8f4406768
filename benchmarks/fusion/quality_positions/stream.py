"""Requests of the synthetic task: questions that share documents, as those of one knowledge base do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

import torch
from torch import Tensor

from ragorder.benchmarks.fusion.fusion.task import Level, draw_corpora
from ragorder.document import Document

__all__ = ["DOCUMENT_TOKENS", "Asked", "Stream", "Task", "draw_stream"]

Task = Literal["look-up", "definition first", "link first"]
"""A look-up needs one document; a chain needs two, which retrieval ranks in this order."""

CORPORA, DOCUMENTS, SOURCE = 10, 40, 4
"""Knowledge bases; documents of each; documents of one source, which refer to each other alone."""

DOCUMENT_TOKENS = 200
"""As long as real ones are: the orderer and its cache count these, the model reads lines of three tokens."""

_GOLD, _ALIKE, _POPULAR, _AGAIN = 2.5, 1.0, 0.5, 0.3
"""In a document's score: that it is needed; that it is of the same source; by the logarithm of its popularity; the
noise with which the same question is asked again. A fixed noise of 1 is the question's own."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`documents` of one corpus, best first; `gold`: those that are needed, the one that the question names first."""

    corpus: int
    name: int
    value: int
    documents: tuple[int, ...]
    gold: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stream:
    tokens: Tensor
    """int64 (corpora, documents, document tokens)."""

    requests: Sequence[Asked]

    def documents(self, asked: Asked) -> list[Document]:
        return [_document(asked.corpus, number) for number in asked.documents]


@cache
def _document(corpus: int, number: int) -> Document:
    source = f"{corpus}-{number // SOURCE}"
    return Document(f"{corpus}-{number}", tokens=DOCUMENT_TOKENS, metadata={"source": source})


def draw_stream(count: int, task: Task, documents: int, seed: int) -> Stream:
    """So many requests with this many documents each. Corpora, questions and documents differ in popularity (Zipf); the
    documents that a question needs are always among those retrieved, at any rank."""
    generator = torch.Generator().manual_seed(seed)
    corpora = draw_corpora(CORPORA, Level(2, documents), generator, documents=DOCUMENTS, topic=SOURCE)
    chains, random = corpora.chains, Random(seed)
    links = chains.heads.shape[1]
    # The first links, and documents, of all corpora are no likelier than others.
    questions = [random.sample(range(links), links) for _ in range(CORPORA)]
    popular = [random.sample(range(DOCUMENTS), DOCUMENTS) for _ in range(CORPORA)]
    requests = []
    for _ in range(count):
        (corpus,) = random.choices(range(CORPORA), _zipf(CORPORA))
        (link,) = random.choices(questions[corpus], _zipf(links))
        referring, defining, _ = chains.documents[corpus, link].tolist()
        gold = (defining,) if task == "look-up" else (referring, defining)
        names = chains.ends if task == "look-up" else chains.heads
        own = Random(f"{seed} {corpus} {link}")
        scores = [
            _GOLD * (number in gold)
            + _ALIKE * (number // SOURCE == defining // SOURCE)
            - _POPULAR * math.log(1 + popular[corpus][number])
            + _gumbel(own)
            + _AGAIN * _gumbel(random)
            for number in range(DOCUMENTS)
        ]
        ranked = sorted(range(DOCUMENTS), key=scores.__getitem__, reverse=True)
        others = [number for number in ranked if number not in gold][: documents - len(gold)]
        retrieved = [number for number in ranked if number in gold or number in others]
        if task != "look-up":
            first, second = (defining, referring) if task == "definition first" else (referring, defining)
            places = sorted(map(retrieved.index, gold))
            retrieved[places[0]], retrieved[places[1]] = first, second
        name, value = int(names[corpus, link]), int(chains.values[corpus, link])
        requests.append(Asked(corpus, name, value, tuple(retrieved), gold))
    return Stream(corpora.tokens, requests)


@cache
def _zipf(count: int) -> tuple[float, ...]:
    return tuple(1 / rank for rank in range(1, count + 1))


def _gumbel(random: Random) -> float:
    return -math.log(-math.log(max(random.random(), 1e-12)))
