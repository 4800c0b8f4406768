"""Requests and conversations at a simulated cloud, in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from ragorder import Document, Ordering
from ragorder.benchmarks.chats.clouds.policies import (
    CHATS,
    POLICIES,
    CloudChat,
    make_builder,
    make_document,
    make_orderer,
    make_question,
    make_text,
)
from ragorder.benchmarks.chats.talks import NEAREST, TOPICS, draw_topics, find_again
from ragorder.clouds import CacheRules
from ragorder.eval.engines.cloud import CloudAnswer, SimulatedCloud

if TYPE_CHECKING:
    from ragorder.benchmarks.chats.clouds.cells import CloudsCell

__all__ = ["serve", "serve_conversations", "talks"]

_ANSWER_TOKENS = 200
Rankings = Sequence[Sequence[Sequence[int]]]


def serve(
    rankings: Sequence[Sequence[int]],
    cell: CloudsCell,
    rules: CacheRules,
    policy: str,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Rows of a `CloudsRecord`. Requests overlap: what one writes can be read from its first token on."""
    now = 0.0
    builder = make_builder(cell)
    documents = {number: make_document(number, cell.document_tokens) for ranking in rankings for number in ranking}
    asked = POLICIES[policy](rules, builder, lambda: now, cell.question_tokens)
    cloud = SimulatedCloud(rules)
    rng = random.Random(f"arrivals {seed}")
    events: list[tuple[float, int, Callable[[], None]]] = []
    numbers = count()
    rows: dict[str, list[int]] = {
        "prompt_tokens": [],
        "cached_tokens": [],
        "written_tokens": [],
        "predicted_tokens": [],
    }
    at_s = 0.0
    for number, ranking in enumerate(rankings):
        at_s += rng.expovariate(1 / cell.gap_s)
        while events and events[0][0] <= at_s:
            now, _, happen = heappop(events)
            happen()
        now = at_s
        ordering = asked.ordering([documents[each] for each in ranking])
        predicted = asked.predicted(ordering)
        answer = cloud.begin(asked.body(make_question(number, cell.question_tokens), ordering), now)

        first: Callable[[], None] = partial(_first_token, cloud, answer, ordering)
        last: Callable[[], None] = partial(asked.confirm, ordering, cloud.usage(answer))
        heappush(events, (now + cell.first_token_s, next(numbers), first))
        heappush(events, (now + max(cell.first_token_s, cell.answer_s), next(numbers), last))
        for name, tokens in zip(
            rows, (answer.prompt_tokens, answer.cached_tokens, answer.written_tokens, predicted), strict=True
        ):
            rows[name].append(tokens)
        advance()
    return rows


def _first_token(cloud: SimulatedCloud, answer: CloudAnswer, ordering: Ordering[Document]) -> None:
    cloud.first_token(answer)
    ordering.readable()


def talks(conversations: int, turns: int, seed: int) -> Rankings:
    """Numbers of documents, best first, for each turn of conversations on 25 topics, drawn by a power law: each turn
    finds five of its topic's eight documents, in another order."""
    rng = random.Random(f"talks {seed}")
    topics = [range(topic * NEAREST, (topic + 1) * NEAREST) for topic in range(TOPICS)]
    return [
        [find_again(rng, topics[topic]) for _ in range(turns)]
        for topic in draw_topics(rng, range(TOPICS), conversations)
    ]


def serve_conversations(
    rankings: Rankings,
    cell: CloudsCell,
    rules: CacheRules,
    policy: str,
    seed: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[int]]:
    """Rows of a `CloudsRecord`, in the order in which turns are asked. A conversation begins every `gap_s` for each of
    its turns; its next question comes `pause_s` after an answer, on average."""
    return _Run(rankings, cell, rules, policy, seed, advance).serve()


class _Run:
    def __init__(
        self,
        rankings: Rankings,
        cell: CloudsCell,
        rules: CacheRules,
        policy: str,
        seed: int,
        advance: Callable[[], None],
    ) -> None:
        self._rankings, self._cell, self._advance = rankings, cell, advance
        self._now = 0.0
        self._rng = random.Random(f"arrivals {seed}")
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._questions = count()
        self._cloud = SimulatedCloud(rules)
        builder = make_builder(cell)
        orderer = make_orderer(rules, builder, lambda: self._now, cell.question_tokens)
        self._make: Callable[[], CloudChat] = partial(CHATS[policy], rules, builder, orderer)
        self._documents: dict[int, Document] = {}
        self._rows: dict[str, list[int]] = {
            "prompt_tokens": [],
            "cached_tokens": [],
            "written_tokens": [],
            "predicted_tokens": [],
        }

    def serve(self) -> dict[str, list[int]]:
        at_s = 0.0
        for turns in self._rankings:
            at_s += self._rng.expovariate(1 / (self._cell.gap_s * len(turns)))
            self._at(at_s, partial(self._ask, self._make(), turns))
        while self._events:
            self._now, _, happen = heappop(self._events)
            happen()
        return self._rows

    def _at(self, at_s: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (at_s, next(self._numbers), happen))

    def _ask(self, chat: CloudChat, turns: Sequence[Sequence[int]]) -> None:
        cell, number = self._cell, next(self._questions)
        documents = [self._document(each) for each in turns[0]]
        answer = self._cloud.begin(chat.ask(make_question(number, cell.question_tokens), documents), self._now)

        def first_token() -> None:
            self._cloud.first_token(answer)
            chat.readable()

        def last_token() -> None:
            chat.answered(make_text(number, _ANSWER_TOKENS), self._cloud.usage(answer))
            if turns[1:]:
                pause_s = self._rng.expovariate(1 / cell.pause_s)
                self._at(self._now + pause_s, partial(self._ask, chat, turns[1:]))

        self._at(self._now + cell.first_token_s, first_token)
        self._at(self._now + max(cell.first_token_s, cell.answer_s), last_token)
        figures = answer.prompt_tokens, answer.cached_tokens, answer.written_tokens, chat.predicted_tokens
        for name, tokens in zip(self._rows, figures, strict=True):
            self._rows[name].append(tokens)
        self._advance()

    def _document(self, number: int) -> Document:
        if number not in self._documents:
            self._documents[number] = make_document(number, self._cell.document_tokens)
        return self._documents[number]
