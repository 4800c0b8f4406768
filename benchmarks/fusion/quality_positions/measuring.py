"""Streams of requests ordered for a simulated prefix cache, and answered by the chain model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from random import Random
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from ragorder import Lengths
from ragorder.benchmarks.fusion.toy.task import ASK, BOS, ChainModel, draw_corpora, hidden_states
from ragorder.document import Document
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import NumberedPrompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.options import SIM_LIKE
from ragorder.eval.running.policies import ORDERERS, make_policy
from ragorder.eval.suites.quality.orders import Order

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
    """Draw `count` requests by popularities (Zipf); the documents that a question needs are among its own."""
    generator = torch.Generator().manual_seed(seed)
    corpora = draw_corpora(CORPORA, DOCUMENTS, generator, topic=SOURCE)
    chains, random = corpora.chains, Random(seed)
    links = chains.names.shape[1]
    # The first links, and documents, of all corpora are no likelier than others.
    questions = [random.sample(range(links), links) for _ in range(CORPORA)]
    popular = [random.sample(range(DOCUMENTS), DOCUMENTS) for _ in range(CORPORA)]
    requests = []
    for _ in range(count):
        (corpus,) = random.choices(range(CORPORA), _zipf(CORPORA))
        (link,) = random.choices(questions[corpus], _zipf(links))
        referring, defining = chains.documents[corpus, link].tolist()
        gold = (defining,) if task == "look-up" else (referring, defining)
        names = chains.aliases if task == "look-up" else chains.names
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


Prompt = tuple[int, int, tuple[int, ...]]
"""A corpus, the name asked for, and documents of the corpus."""

_BATCH_TOKENS = 1_200
"""Of prompts answered together: their attention fits into the processor's cache."""


@dataclass(frozen=True, slots=True)
class Ordered:
    """`permutation`: for each place the rank of its document."""

    permutation: tuple[int, ...]
    cached_tokens: int
    prompt_tokens: int


def order_stream(stream: Stream, policy: str, capacity_tokens: int | None, seed: int) -> list[Ordered]:
    """The requests one after the other, each confirmed before the next, with an empty cache at first."""
    order, prompts = Order.parse(policy), NumberedPrompts()
    engine = SimEngine(capacity_tokens=capacity_tokens, like=SIM_LIKE)
    settings = {**order.guards, "strict": True} if order.policy in ORDERERS else {}
    orderer = make_policy(order.policy, engine=engine, prompts=prompts, seed=seed, settings=settings)
    found = []
    for number, asked in enumerate(stream.requests):
        request = TraceRequest(str(number), stream.documents(asked))
        ordering = orderer.order(request.documents, lengths=Lengths(suffix=prompts.suffix_tokens(request)))
        served = engine.generate(prompts.token_ids(number, request, ordering.documents))
        ordering.confirm(served.cached_tokens)
        found.append(Ordered(tuple(ordering.permutation), served.cached_tokens, served.prompt_tokens))
    return found


@dataclass
class Answers:
    """Answers of a model to the requests of a stream, each prompt once for all policies that make it."""

    model: ChainModel
    stream: Stream
    _kept: dict[Prompt, int] = field(default_factory=dict)

    def to(self, orders: Sequence[Sequence[int]]) -> list[int]:
        """The tokens answered, with the documents of each request in an order of their ranks."""
        asked: list[Prompt] = [
            (each.corpus, each.name, tuple(each.documents[rank] for rank in order))
            for each, order in zip(self.stream.requests, orders, strict=True)
        ]
        new = [key for key in dict.fromkeys(asked) if key not in self._kept]
        if new:
            prompts = torch.stack([self._prompt(*key) for key in new])
            several = max(1, _BATCH_TOKENS // prompts.shape[1])
            for keys, batch in zip(_parts(new, several), prompts.split(several), strict=True):
                logits = self.model.logits(hidden_states(self.model, batch)[0][:, -1])
                self._kept.update(zip(keys, logits.argmax(-1).tolist(), strict=True))
        return [self._kept[key] for key in asked]

    def _prompt(self, corpus: int, name: int, documents: Sequence[int]) -> Tensor:
        text = self.stream.tokens[corpus, list(documents)].flatten()
        return torch.cat([torch.tensor([BOS]), text, torch.tensor([ASK, name])])


def rows_of(
    stream: Stream, orders: Sequence[Ordered], answers: Answers, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Return the columns of a record."""
    said = answers.to([each.permutation for each in orders])
    rows: dict[str, list[float]] = {}
    for asked, order, answer in zip(stream.requests, orders, said, strict=True):
        named, *others = (_place(asked, order, gold) for gold in asked.gold)
        moved = fmean(abs(rank - place) for place, rank in enumerate(order.permutation))
        row = {
            "right": int(answer == asked.value),
            "rank": asked.documents.index(asked.gold[0]),
            "place": named,
            **({"other_place": others[0]} if others else {}),
            "displacement": round(moved, 4),
            "cached_tokens": order.cached_tokens,
            "prompt_tokens": order.prompt_tokens,
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
        advance()
    return rows


def _place(asked: Asked, order: Ordered, document: int) -> int:
    return order.permutation.index(asked.documents.index(document))


def _parts(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]
