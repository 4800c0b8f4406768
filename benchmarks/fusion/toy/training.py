"""Training of the chain model on one core: batches, ever more documents, and its course."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ragorder.benchmarks.fusion.toy.task import (
    ALIAS_OF,
    ASK,
    BOS,
    DOCUMENT_TOKENS,
    ChainModel,
    draw_corpora,
    hidden_states,
)

KINDS = ("one hop", "two hops", "alias", "link")
"""What a token must predict, numbered from 1: a question's answer, or the value that a link spells out."""

_ONE, _TWO, _ALIAS, LINK = 1, 2, 3, 4
_SHOWN = 0.5
_QUESTIONS = 2
"""For each document."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    tokens: Tensor
    """int64 (B, T)"""

    kinds: Tensor
    """The kind of what comes next; 0: it cannot be predicted."""

    start: int
    """Where the questions begin."""


def draw_batch(count: int, documents: int, generator: torch.Generator) -> TrainingBatch:
    """Chains are asked for, and must be resolved within the documents, only if they lead to documents in front.

    Half of the links spell their value out: as texts repeat themselves, a model learns to resolve links while it reads.
    """
    corpora = draw_corpora(count, documents, generator, shown=_SHOWN)
    chains = corpora.chains
    order = torch.rand(count, documents, generator=generator).argsort(1)
    tokens, lines = (_ordered(each, order) for each in (corpora.tokens, corpora.lines))
    places = order.argsort(1).gather(1, chains.documents.flatten(1)).view_as(chains.documents)
    early = places[..., 0] > places[..., 1]

    def chance(share: float) -> Tensor:
        return torch.rand(picked.shape, generator=generator) < share

    askable = early & ~chains.shown
    picked = (torch.rand(early.shape, generator=generator) + 10.0 * ~askable).argsort(1)
    picked = picked[:, : _QUESTIONS * documents]
    names, aliases, values = (each.gather(1, picked) for each in (chains.names, chains.aliases, chains.values))
    for_alias, whole = chance(0.25), askable.gather(1, picked) & chance(0.8)
    asked = torch.where(for_alias, ALIAS_OF, ASK), torch.where(for_alias | whole, names, aliases)
    questions = torch.stack([*asked, torch.where(for_alias, aliases, values)], -1).flatten(1)
    text = torch.cat([torch.full((count, 1), BOS), tokens], 1)
    start = text.shape[1]
    kinds = torch.zeros(count, start + questions.shape[1], dtype=torch.long)
    kinds[:, start + 1 :: 3] = torch.where(for_alias, _ALIAS, torch.where(whole, _TWO, _ONE))
    resolved = torch.where(early & chains.shown, LINK, 0)
    kinds[:, 1:start] = torch.cat([torch.zeros(count, 1, dtype=torch.long), resolved], 1).gather(1, lines)
    return TrainingBatch(torch.cat([text, questions], 1), kinds, start)


def _ordered(documents: Tensor, order: Tensor) -> Tensor:
    return documents.gather(1, order[..., None].expand_as(documents)).flatten(1)


_RATE, _LAST_RATE, _WARM_UP_STEPS = 2e-3, 1e-4, 100
STEP_TOKENS = 2_400
LEARNT = 0.97
_MEMORY = 0.95
_LOOKS_EARLY = 10
"""In one step of ten questions see the documents in all passes, otherwise in the last alone: what they need must have
been resolved in the documents."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Training on so many documents, in turn: until learnt, at most for `steps`, or (`settles`) for all of them."""

    documents: Sequence[int]
    steps: int
    settles: bool = False


CURRICULUM = (Stage([3], 6_000), Stage([5], 3_000), Stage([8, 16, 16], 1_200, settles=True))


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of training: processor time, tokens so far, documents, and the share of right predictions by kind."""

    seconds: float
    tokens: int
    documents: int
    right: dict[str, float]


class Training:
    """One model in training; the same seed on the same machine gives the same model."""

    def __init__(self, seed: int) -> None:
        self.model = ChainModel.random(seed)
        self.steps = self.tokens = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = [weight.requires_grad_(True) for weight in self.model.trained()]
        self._optimizer = torch.optim.AdamW(self._weights, lr=_RATE, betas=(0.9, 0.98))
        self._start = time.process_time()

    def run(self, stage: Stage) -> Iterator[Point]:
        """A point for each step."""
        known = 0.0
        for step in range(stage.steps):
            documents = stage.documents[step % len(stage.documents)]
            left = 1 - step / stage.steps if stage.settles else 1.0
            point = self._step(documents, max(_LAST_RATE, _RATE * left))
            yield point
            answered = point.right.get(KINDS[_TWO - 1], 0.0)
            known = _MEMORY * known + (1 - _MEMORY) * answered
            if known > LEARNT and not stage.settles:
                return

    def _step(self, documents: int, rate: float) -> Point:
        several = max(2, STEP_TOKENS // (documents * (DOCUMENT_TOKENS + 3 * _QUESTIONS)))
        batch = draw_batch(several, documents, self._generator)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * min(1, (self.steps + 1) / _WARM_UP_STEPS)
        inputs, nexts, kinds = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.kinds[:, :-1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            last, middle = hidden_states(self.model, inputs, batch.start if self.steps % _LOOKS_EARLY else None)
            logits = self.model.logits(last[kinds > 0])
            links = kinds == LINK
            early = self.model.logits(middle[links])
        losses = cross_entropy(logits.float(), nexts[kinds > 0], reduction="none")
        asked = kinds[kinds > 0]
        present = [kind for kind in range(1, len(KINDS) + 1) if (asked == kind).any()]
        loss = torch.stack([losses[asked == kind].mean() for kind in present]).sum()
        if links.any():
            loss = loss + cross_entropy(early.float(), nexts[links])
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        self._optimizer.step()
        self.steps += 1
        self.tokens += batch.tokens.numel()
        right = (logits.argmax(-1) == nexts[kinds > 0]).float()
        shares = {KINDS[kind - 1]: float(right[asked == kind].mean()) for kind in present}
        return Point(time.process_time() - self._start, self.tokens, documents, shares)


def train(seed: int, stages: Sequence[Stage], advance: Callable[[Point], None]) -> Iterator[ChainModel]:
    """The model after each stage, as it is saved. One thread is enough."""
    training = Training(seed)
    for stage in stages:
        for point in training.run(stage):
            advance(point)
        yield training.model.rounded()


_STEPS = 50


@dataclass(slots=True)
class History:
    """Means of 50 steps each."""

    steps: int = 0
    rows: dict[str, list[float | None]] = field(default_factory=dict)
    _recent: list[Point] = field(default_factory=list)

    def take(self, advance: Callable[[], None]) -> Callable[[Point], None]:
        def keep(point: Point) -> None:
            self.steps += 1
            self._recent.append(point)
            if len(self._recent) == _STEPS:
                self.close()
            advance()

        return keep

    def close(self) -> None:
        """With what the last steps, fewer, had."""
        if not self._recent:
            return
        last, recent = self._recent[-1], self._recent
        self._recent = []
        row: dict[str, float | None] = {"seconds": round(last.seconds, 1), "tokens": last.tokens}
        row["documents"] = last.documents
        for kind in KINDS:
            known = [point.right[kind] for point in recent if kind in point.right]
            row[kind] = round(fmean(known), 3) if known else None
        for name, value in row.items():
            self.rows.setdefault(name, []).append(value)
