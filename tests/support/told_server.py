"""vLLM's block pool, and an application that tells an orderer about its conversations token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragorder import History, Lengths, Orderer, Ordering, Segment
from ragorder.eval.engines.sim import SimEngine

BLOCK = 16
CLOSING = 5


@dataclass
class Told:
    """A conversation as a server has it: tokens of what was said, by segment."""

    segments: list[Segment] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class ToldServer:
    """An engine, its orderer, and what was predicted and reported."""

    def __init__(self, blocks: int | None, seed: int, **options: Any) -> None:
        capacity = None if blocks is None else blocks * BLOCK
        self.draw = random.Random(seed)
        self.engine = SimEngine(block_size=BLOCK, capacity_tokens=capacity, like="vllm-0.32")
        self.system = self.tokens(37)
        self.texts = {f"d{number}": self.tokens(self.draw.randrange(10, 90)) for number in range(24)}
        self.orderer = Orderer(
            strict=True,
            block_size=BLOCK,
            capacity_tokens=capacity,
            prefix_tokens=len(self.system),
            key=lambda name: name,
            tokens=lambda name: len(self.texts[name]),
            **options,
        )
        self.predicted: list[int] = []
        self.reported: list[int] = []

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(1 << 40) for _ in range(count)]

    def pick(self) -> list[str]:
        return self.draw.sample(sorted(self.texts), 3)

    def ask(
        self,
        told: Told,
        documents: Sequence[str],
        question: Sequence[int] | None = None,
        *,
        fail: bool = False,
        cut: bool = False,
    ) -> Told:
        """The conversation with one more turn, or as it was if the request fails or its answer is cut off."""
        question = self.tokens(self.draw.randrange(3, 40)) if question is None else question
        answer = self.tokens(self.draw.randrange(2, 60))
        named = Segment(f"q{hash(tuple(question))}", len(question))
        ordering: Ordering[str] = self.orderer.order(
            documents,
            history=History(told.segments, question=named),
            lengths=Lengths(suffix=len(question) + len(answer) - 1),
        )
        self.last = ordering
        sent = [*told.tokens, *(token for name in ordering.documents for token in self.texts[name]), *question]
        prompt = [*self.system, *sent]
        if fail:
            ordering.discard()
            return told
        done = self.engine.generate(prompt, answer=answer[:-1])
        self.predicted.append(ordering.cached_tokens)
        self.reported.append(done.cached_tokens)
        if cut:
            ordering.confirm()
            return told
        said = [*answer, *self.tokens(CLOSING)]
        keys = f"m{hash(tuple(sent))}", f"a{hash(tuple(said))}"
        ordering.set_history_keys(*keys, closing_tokens=CLOSING)
        ordering.confirm(done.cached_tokens, len(prompt) + len(answer), prompt_tokens=len(prompt))
        message = Segment(keys[0], len(sent) - len(told.tokens))
        return Told([*told.segments, message, Segment(keys[1], len(said))], [*sent, *said])
