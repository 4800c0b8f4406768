"""Conversations at a simulated cloud, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count

from ragorder import Document
from ragorder.benchmarks.chats.clouds.chats import CHATS, CloudChat, make_orderer
from ragorder.benchmarks.chats.clouds.prompts import make_builder, make_document, make_question, make_text
from ragorder.benchmarks.chats.clouds.record import CloudsCell
from ragorder.clouds import CacheRules
from ragorder.eval.engines.cloud import SimulatedCloud

__all__ = ["serve_conversations", "talks"]

_TOPICS = 25
_NEAREST = 8
_DOCUMENTS = 5
# By so many ranks another wording may move a document.
_NOISE = 6.0
_ANSWER_TOKENS = 200

Rankings = Sequence[Sequence[Sequence[int]]]


def talks(conversations: int, turns: int, seed: int) -> Rankings:
    """Numbers of documents, best first, for each turn of conversations on 25 topics, drawn by a power law: each turn
    finds five of its topic's eight documents, in another order."""
    rng = random.Random(f"talks {seed}")
    drawn = rng.choices(range(_TOPICS), [1 / rank for rank in range(1, _TOPICS + 1)], k=conversations)

    def find(topic: int) -> list[int]:
        score = {topic * _NEAREST + rank: rank + rng.uniform(0, _NOISE) for rank in range(_NEAREST)}
        return sorted(score, key=score.__getitem__)[:_DOCUMENTS]

    return [[find(topic) for _ in range(turns)] for topic in drawn]


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
