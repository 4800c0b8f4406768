"""Training of the chain model on one core: batches, ever more documents and hops, and its course."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ragorder.benchmarks.fusion.fusion.task import ALIAS_OF, ASK, BOS, ChainModel, Level, draw_corpora, previous, rotate

KINDS = ("one hop", "two hops", "three hops", "alias", "link", "link over a relay")
"""What a token must predict, numbered from 1: a question's answer, or the value that a link or relay spells out."""

LINKS = (5, 6)
_ALIAS = 4
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


def draw_batch(count: int, level: Level, generator: torch.Generator) -> TrainingBatch:
    """Chains are asked for, and must be resolved within the documents, only if they lead to documents in front.

    Half of the links spell their value out: as texts repeat themselves, a model learns to resolve links while it reads,
    and this is what the KV of a document that was computed alone lacks.
    """
    corpora = draw_corpora(count, level, generator, documents=level.documents, shown=_SHOWN)
    chains = corpora.chains
    order = torch.rand(count, level.documents, generator=generator).argsort(1)
    tokens, lines = (_ordered(each, order) for each in (corpora.tokens, corpora.lines))
    places = order.argsort(1).gather(1, chains.documents.flatten(1)).view_as(chains.documents)
    early = (places[..., 0] > places[..., 1]) & (places[..., 1] >= places[..., 2])

    def chance(share: float) -> Tensor:
        return torch.rand(picked.shape, generator=generator) < share

    askable = early & ~chains.shown
    picked = (torch.rand(early.shape, generator=generator) + 10.0 * ~askable).argsort(1)
    picked = picked[:, : _QUESTIONS * level.documents]
    heads, aliases, ends, values = (
        each.gather(1, picked) for each in (chains.heads, chains.aliases, chains.ends, chains.values)
    )
    hops = chains.hops.expand_as(early)
    for_alias, whole = chance(0.25), askable.gather(1, picked) & chance(0.8)
    asked = torch.where(for_alias, ALIAS_OF, ASK), torch.where(for_alias | whole, heads, ends)
    questions = torch.stack([*asked, torch.where(for_alias, aliases, values)], -1).flatten(1)
    documents = torch.cat([torch.full((count, 1), BOS), tokens], 1)
    start = documents.shape[1]
    kinds = torch.zeros(count, start + questions.shape[1], dtype=torch.long)
    depth = torch.where(whole, hops.gather(1, picked), 1)
    kinds[:, start + 1 :: 3] = torch.where(for_alias, _ALIAS, depth)
    resolved = torch.where(early & chains.shown, hops + LINKS[0] - 2, 0)
    kinds[:, 1:start] = torch.cat([torch.zeros(count, 1, dtype=torch.long), resolved], 1).gather(1, lines)
    return TrainingBatch(torch.cat([documents, questions], 1), kinds, start)


def _ordered(documents: Tensor, order: Tensor) -> Tensor:
    return documents.gather(1, order[..., None].expand_as(documents)).flatten(1)


_RATE, _LAST_RATE, _WARM_UP_STEPS = 2e-3, 1e-4, 100
STEP_TOKENS = 2_400
LEARNT = 0.97
_MEMORY = 0.95
_LOOKS_EARLY = 10
"""In one step of ten questions see the documents in all passes, otherwise in the last alone: what they need must have
been resolved in the documents."""
_HIDDEN = -1e4


@dataclass(frozen=True, slots=True)
class Stage:
    """Training on these levels in turn: until learnt, at most for `steps`, or (`settles`) for all of them."""

    levels: Sequence[Level]
    steps: int
    settles: bool = False


_TWO = (
    Stage([Level(2, 3)], 6_000),
    Stage([Level(2, 5)], 3_000),
    Stage([Level(2, 8), Level(2, 16), Level(2, 16)], 1_200, settles=True),
)
_THREE = (
    Stage([Level(3, 3), Level(3, 5)], 4_000),
    Stage([Level(2, 8), Level(3, 8), Level(2, 16), Level(3, 16), Level(3, 16)], 1_500, settles=True),
)
CURRICULA = {2: _TWO, 3: (*_TWO, *_THREE)}
"""By the most hops."""

_GOING_ON = 1_000_000
"""Of the seed: what goes on sees other batches than what began."""


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of training: processor time, tokens so far, documents, and the share of right predictions by kind."""

    seconds: float
    tokens: int
    hops: int
    documents: int
    right: dict[str, float]


class Training:
    """One model in training; the same seed on the same machine gives the same model."""

    def __init__(self, seed: int, start: ChainModel | None = None) -> None:
        self.model = start or ChainModel.random(seed)
        self.steps = self.tokens = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._weights = [weight.requires_grad_(True) for weight in self.model.trained()]
        self._optimizer = torch.optim.AdamW(self._weights, lr=_RATE, betas=(0.9, 0.98))
        self._start = time.process_time()

    def run(self, stage: Stage) -> Iterator[Point]:
        """A point for each step."""
        known = 0.0
        for step in range(stage.steps):
            level = stage.levels[step % len(stage.levels)]
            left = 1 - step / stage.steps if stage.settles else 1.0
            point = self._step(level, max(_LAST_RATE, _RATE * left))
            yield point
            answered = point.right.get(KINDS[level.hops - 1], 0.0)
            known = _MEMORY * known + (1 - _MEMORY) * answered
            if known > LEARNT and not stage.settles:
                return

    def _step(self, level: Level, rate: float) -> Point:
        batch = draw_batch(max(2, STEP_TOKENS // (level.tokens + 6 * level.documents)), level, self._generator)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * min(1, (self.steps + 1) / _WARM_UP_STEPS)
        inputs, nexts, kinds = batch.tokens[:, :-1], batch.tokens[:, 1:], batch.kinds[:, :-1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            last, middle = hidden_states(self.model, inputs, batch.start if self.steps % _LOOKS_EARLY else None)
            logits = self.model.logits(last[kinds > 0])
            links = (kinds == LINKS[0]) | (kinds == LINKS[1])
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
        return Point(time.process_time() - self._start, self.tokens, level.hops, level.documents, shares)


def remaining(hops: int, known: int | None) -> Sequence[Stage]:
    """The stages for a model that is trained for `known` hops: of the same number, the last stage again."""
    stages = CURRICULA[hops]
    if known is None:
        return stages
    return stages[-1:] if known == hops else stages[len(CURRICULA[known]) :]


def train(
    seed: int, stages: Sequence[Stage], advance: Callable[[Point], None], start: ChainModel | None = None
) -> Iterator[ChainModel]:
    """The model after each stage, as it is saved; at first a random one without `start`. One thread is enough."""
    training = Training(seed if start is None else seed + _GOING_ON, start)
    for stage in stages:
        for point in training.run(stage):
            advance(point)
        yield training.model.rounded()


def hidden_states(model: ChainModel, tokens: Tensor, start: int | None) -> tuple[Tensor, Tensor]:
    """Return normed states at the end, and before the last pass, in which tokens from `start` on see documents only."""
    hidden, length = model.embed(tokens, previous(tokens)), tokens.shape[1]
    positions = torch.arange(length)[None]
    causal = torch.full((length, length), _HIDDEN).triu(1)
    late = causal.clone()
    if start is not None:
        late[start:, 1:start] = _HIDDEN
    for layer in range(model.passes):
        middle, last = model.normed(hidden), layer == model.passes - 1
        query, key, value = model.project(hidden)
        scores = rotate(query, positions) @ rotate(key, positions).transpose(-1, -2)
        # On a CPU and at these lengths 10 to 60 % faster than the fused function, with its backward pass.
        weights = (scores + (causal if last else late).to(scores.dtype)).softmax(-1)
        attended = weights.to(value.dtype) @ value
        hidden = model.finish(hidden, attended)
    return model.normed(hidden), middle


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
        row |= {"hops": last.hops, "documents": last.documents}
        for kind in KINDS:
            known = [point.right[kind] for point in recent if kind in point.right]
            row[kind] = round(fmean(known), 3) if known else None
        for name, value in row.items():
            self.rows.setdefault(name, []).append(value)
