"""Training batches of the synthetic task: documents, then many questions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragorder.benchmarks.fusion.fusion.task import ALIAS_OF, ASK, BOS, Level, draw_corpora

__all__ = ["KINDS", "LINKS", "TrainingBatch", "draw_batch", "question_kind"]

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


def question_kind(hops: int) -> int:
    return hops


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
