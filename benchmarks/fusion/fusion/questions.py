"""Questions of the synthetic task, each on a corpus of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ragorder.benchmarks.fusion.fusion.cells import Order
from ragorder.benchmarks.fusion.fusion.task import (
    ALIASES,
    ASK,
    BOS,
    CORPUS_DOCUMENTS,
    NAMES,
    VOCABULARY,
    Level,
    draw_corpora,
)

__all__ = ["QUESTION_TOKENS", "Questions", "draw_questions"]

QUESTION_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Questions:
    level: Level
    corpora: Tensor
    """int64 (questions, corpus documents, document tokens)."""

    retrieved: Tensor
    """int64 (questions, documents): numbers of the prompt's documents, in their order."""

    similar: Tensor
    """int64 (questions, corpus documents, others): each document's others, the most similar first."""

    chains: Tensor
    """int64 (questions, hops): the documents that are needed, that of the link first."""

    names: Tensor
    values: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def part(self, start: int, end: int) -> Self:
        chosen = slice(start, end)
        tensors = (self.corpora, self.retrieved, self.similar, self.chains, self.names, self.values)
        return type(self)(self.level, *(each[chosen] for each in tensors))

    @property
    def documents(self) -> Tensor:
        """int64 (questions, documents, document tokens)."""
        return self.of(self.retrieved)

    def retrieved_together(self, neighbours: int) -> float:
        """The share of so many most similar documents, of those in a prompt, that are in the prompt."""
        if not neighbours:
            return 0.0
        of_prompt = self.similar.gather(1, self.retrieved[..., None].expand(-1, -1, self.similar.shape[2]))
        near = of_prompt[..., :neighbours].flatten(1)
        return float((near[..., None] == self.retrieved[:, None]).any(2).float().mean())

    def of(self, numbers: Tensor) -> Tensor:
        """Tokens of documents (questions, n) of each question's corpus."""
        return self.corpora.gather(1, numbers[..., None].expand(-1, -1, self.corpora.shape[2]))

    @property
    def prompts(self) -> Tensor:
        """int64 (questions, 1 + document tokens + 2): BOS, the documents, ASK, the name."""
        ends = torch.tensor([BOS, ASK]).expand(len(self), 2)
        return torch.cat([ends[:, :1], self.documents.flatten(1), ends[:, 1:], self.names[:, None]], 1)


def draw_questions(count: int, level: Level, order: Order, seed: int, topic: int = 0) -> Questions:
    """The same questions and documents in each order. A question gets the documents that it needs, and those that are
    most similar to the first of them: of its `topic` first (see `draw_corpora`)."""
    generator = torch.Generator().manual_seed(seed)
    corpora = draw_corpora(count, level, generator, topic=topic)
    chains = corpora.chains
    several = _all_different(chains.documents[..., : level.hops]) & (chains.hops == level.hops)
    picked = (torch.rand(several.shape, generator=generator) - (~several).float()).argmax(1)
    row = torch.arange(count)
    needed = chains.documents[row, picked][:, : level.hops]
    similarity = _similarity(corpora.tokens)
    if topic:
        topics = torch.arange(CORPUS_DOCUMENTS) // topic
        similarity += (topics[:, None] == topics).float()
    similarity += 1e-4 * torch.rand(similarity.shape, generator=generator)
    similarity.diagonal(dim1=1, dim2=2).fill_(-1)
    score = similarity[row, needed[:, 0]].scatter(1, needed, 2.0)
    retrieved = score.argsort(1, descending=True)[:, : level.documents]
    retrieved = retrieved.gather(1, torch.rand(retrieved.shape, generator=generator).argsort(1))
    if order != "any":
        places = (retrieved[..., None] == needed[:, None]).any(2).nonzero()[:, 1].view(count, level.hops)
        retrieved = retrieved.scatter(1, places, needed.flip(1) if order == "in front" else needed)
    return Questions(
        level,
        corpora.tokens,
        retrieved,
        similarity.argsort(2, descending=True)[..., : CORPUS_DOCUMENTS - 1],
        needed,
        chains.heads[row, picked],
        chains.values[row, picked],
    )


def _all_different(documents: Tensor) -> Tensor:
    pairs = documents[..., :, None] == documents[..., None, :]
    return pairs.sum((-2, -1)) == documents.shape[-1]


def _similarity(documents: Tensor) -> Tensor:
    """Cosines of the documents' TF-IDF vectors over names and aliases."""
    count, number, _ = documents.shape
    words = torch.zeros(count, number, VOCABULARY).scatter_(2, documents, 1.0)[..., ALIASES.start : NAMES.stop]
    weighted = normalize(words * torch.log(number / words.sum(1, keepdim=True).clamp_min(1)), dim=-1)
    return weighted @ weighted.transpose(1, 2)
