"""Conversations on topics of different popularity, whose turns find a topic's documents in another order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from ragorder.eval.data.corpora import Corpus, load_pydocs

T = TypeVar("T")
TEMPLATE = '<document id="{id}">\n{text}\n</document>'
TOPICS = 25
NEAREST = 8
"""Documents of a topic."""
_DOCUMENTS = 5
# The most ranks by which another wording of a question moves a document.
_NOISE = 6.0
# In characters: a document is cut to about the length of a docstring.
_LONGEST = 640


def draw_topics(rng: random.Random, topics: Sequence[T], count: int) -> list[T]:
    """Return the topics of conversations, drawn by a power law."""
    return rng.choices(topics, [1 / rank for rank in range(1, len(topics) + 1)], k=count)


def find_again(rng: random.Random, ranking: Sequence[int]) -> list[int]:
    """Return five of a topic's documents, as another wording of the question ranks them."""
    score = {document: rank + rng.uniform(0, _NOISE) for rank, document in enumerate(ranking)}
    return sorted(score, key=score.__getitem__)[:_DOCUMENTS]


@dataclass(slots=True)
class ChatTurn:
    """A question, and its documents by name and text in retrieval order."""

    question: str
    documents: list[tuple[str, str]]
    answer: str = ""

    def written(self, *, ranks: bool = False) -> list[str]:
        """The documents as an application writes them; `ranks`: under the numbers of their ranks."""
        names = [str(rank) for rank, _ in enumerate(self.documents, 1)] if ranks else [id for id, _ in self.documents]
        return [TEMPLATE.format(id=id, text=text) for id, (_, text) in zip(names, self.documents, strict=True)]

    def shown(self, *, ranks: bool = False) -> str:
        """Documents and question in one text."""
        return "\n".join([*self.written(ranks=ranks), "", self.question])


def conversations(count: int, turns: int, seed: int = 0) -> list[list[ChatTurn]]:
    """Draw conversations on 25 topics of the standard library; each turn finds five of a topic's eight documents."""
    corpus = _corpus()
    rng = random.Random(seed)
    topics = rng.sample(range(len(corpus.questions)), TOPICS)

    def ask(topic: int, number: int) -> ChatTurn:
        found = [corpus.documents[place] for place in find_again(rng, corpus.rankings[topic])]
        documents = [(document.id, document.text[:_LONGEST]) for document in found]
        return ChatTurn(f"{corpus.questions[topic].text} (asked in words of my own: {number})", documents)

    return [[ask(topic, rng.randrange(1000)) for _ in range(turns)] for topic in draw_topics(rng, topics, count)]


@cache
def _corpus() -> Corpus:
    return load_pydocs(top_k=NEAREST)
