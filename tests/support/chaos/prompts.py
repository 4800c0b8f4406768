"""Prompts out of shared documents, as token ids that mean nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

_SYSTEM, _DOCUMENT, _QUESTION = 70, (90, 150), 21
_FIRST_ID, _IDS = 300, 200


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts, and how often each is asked for beside the others."""

    prompts: Sequence[Sequence[int]]
    weights: Sequence[float]

    def draw(self, rng: random.Random) -> int:
        """The number of one."""
        return rng.choices(range(len(self.prompts)), self.weights)[0]


def make_prompts(count: int, *, documents: int = 24, top_k: int = 4, seed: int = 0) -> Prompts:
    """So many prompts of about 570 tokens: a system prompt, `top_k` of the documents, a question. Popular documents are
    in many of them, and some prompts are asked for far more often than others."""
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [_FIRST_ID + rng.randrange(_IDS) for _ in range(length)]

    system = ids(_SYSTEM)
    texts = [ids(rng.randint(*_DOCUMENT)) for _ in range(documents)]
    popularity = [1 / (rank + 1) for rank in range(documents)]
    prompts = []
    for _ in range(count):
        drawn: dict[int, None] = {}
        while len(drawn) < top_k:
            drawn[rng.choices(range(documents), popularity)[0]] = None
        prompts.append([*system, *(token for number in drawn for token in texts[number]), *ids(_QUESTION)])
    return Prompts(prompts, [1 / (rank + 1) for rank in range(count)])
