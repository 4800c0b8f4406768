"""Prompts of random tokens, for models with random weights."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from ragorder.document import Document
from ragorder.eval.data.trace import TraceRequest
from ragorder.eval.engines.prompts import PromptIds

__all__ = ["Layout", "RandomPrompts", "ask_again", "draw_prompt"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt's parts and their tokens."""

    documents: int = 5
    document_tokens: int = 200
    system_tokens: int = 50
    question_tokens: int = 30

    @property
    def tokens(self) -> int:
        return self.end(self.documents) + self.question_tokens

    def end(self, documents: int) -> int:
        """The tokens of the system prompt and so many documents."""
        return self.system_tokens + documents * self.document_tokens

    @property
    def ends(self) -> list[int]:
        return [self.end(documents) for documents in range(self.documents + 1)]


def draw_prompt(layout: Layout, vocabulary: int, rng: random.Random) -> PromptIds:
    return PromptIds(rng.choices(range(vocabulary), k=layout.tokens), layout.ends)


def ask_again(prompt: PromptIds, layout: Layout, documents: int, vocabulary: int, rng: random.Random) -> PromptIds:
    """Another question on the first so many documents of a prompt."""
    end = layout.end(documents)
    question = rng.choices(range(vocabulary), k=layout.question_tokens)
    # Another first token, so that nothing behind the documents is the same.
    question[0] = (prompt[end] + 1) % vocabulary
    return PromptIds([*prompt[:end], *question], layout.ends[: documents + 1])


class RandomPrompts:
    """Prompts of a trace: each document's own random tokens, and a question for each request's place."""

    prefix_tokens = 64
    question_tokens = 20

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._drawn: dict[str, array[int]] = {}

    document_tokens = staticmethod(attrgetter("token_count"))

    def suffix_tokens(self, request: TraceRequest) -> int:
        return self.question_tokens

    def token_ids(self, number: int, request: TraceRequest, documents: Sequence[Document]) -> PromptIds:
        parts = [self._part("system", self.prefix_tokens)]
        parts += [self._part(document.key, document.token_count) for document in documents]
        question = _draw(f"question {number}", self._vocabulary, self.question_tokens)
        return PromptIds([id for part in [*parts, question] for id in part], accumulate(map(len, parts)))

    def _part(self, key: str, tokens: int) -> array[int]:
        if key not in self._drawn:
            self._drawn[key] = _draw(key, self._vocabulary, tokens)
        return self._drawn[key]


def _draw(key: str, vocabulary: int, tokens: int) -> array[int]:
    return array("i", random.Random(key).choices(range(vocabulary), k=tokens))
