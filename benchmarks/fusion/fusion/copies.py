"""Documents' KV as it was computed before a question came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragorder.benchmarks.fusion.fusion.arms import Copies
from ragorder.benchmarks.fusion.fusion.model import ChainModel
from ragorder.benchmarks.fusion.fusion.questions import Questions
from ragorder.benchmarks.fusion.fusion.reference import ReferenceKV, compute_behind, compute_prompts, system_prompt
from ragorder.benchmarks.fusion.fusion.task import BOS

__all__ = ["EARLIER_DOCUMENTS", "DocumentCopies", "make_copies"]

EARLIER_DOCUMENTS = 3
"""In front of a document in the earlier prompt that its copy is from."""


@dataclass(frozen=True, slots=True)
class DocumentCopies:
    kv: Sequence[ReferenceKV]
    """For each of a prompt's documents, in its order."""

    crossed: Tensor
    """(questions, document tokens of the prompt): the share of attention that went to other documents."""


def make_copies(model: ChainModel, questions: Questions, copies: Copies, neighbours: int, seed: int) -> DocumentCopies:
    if copies == "served":
        return _from_earlier_prompts(model, questions, seed)
    made = []
    for place, numbers in enumerate(questions.retrieved.unbind(1)):
        made.append(_behind(model, questions, numbers, _in_front(questions, place, copies, neighbours)))
    return DocumentCopies(made, torch.zeros(len(questions), questions.level.tokens))


def _in_front(questions: Questions, place: int, copies: Copies, neighbours: int) -> Sequence[Tensor]:
    """Numbers of the documents, one a question each, whose KV the document at this place of the prompts is computed
    behind."""
    retrieved = questions.retrieved
    if copies == "alone":
        return []
    if copies == "in front":
        return [*retrieved[:, :place].unbind(1)]
    if copies == "retrieved":
        return [*retrieved[:, :place].unbind(1), *retrieved[:, place + 1 :].unbind(1)]
    similar = questions.similar[torch.arange(len(questions)), retrieved[:, place]][:, :neighbours]
    return [*(similar if copies == "similar, best first" else similar.flip(1)).unbind(1)]


def _behind(model: ChainModel, questions: Questions, numbers: Tensor, in_front: Sequence[Tensor]) -> ReferenceKV:
    """Of one document a question, behind the KV of others that were computed alone (Eq. 10)."""
    system = system_prompt(model, len(questions))
    others = [questions.of(other[:, None])[:, 0] for other in in_front]
    alone = [compute_behind(model, document, system).kv for document in others]
    own = questions.of(numbers[:, None])[:, 0]
    return compute_behind(model, own, ReferenceKV.joined(system, *alone)).kv


def _from_earlier_prompts(model: ChainModel, questions: Questions, seed: int) -> DocumentCopies:
    """Of each document, computed exactly behind others of its corpus."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(questions.similar.shape, generator=generator).argsort(2)[..., :EARLIER_DOCUMENTS]
    others, row = questions.similar.gather(2, drawn), torch.arange(len(questions))
    made, crossed = [], []
    for numbers in questions.retrieved.unbind(1):
        documents = questions.of(torch.cat([others[row, numbers], numbers[:, None]], 1))
        prompts = torch.cat([torch.full((len(questions), 1), BOS), documents.flatten(1)], 1)
        start = prompts.shape[1] - documents.shape[2]
        found = compute_prompts(model, prompts)
        made.append(found.kv.part(start, prompts.shape[1]))
        crossed.append(torch.stack([each[:, :, start:, 1:start].sum(-1).mean(1) for each in found.attention]).mean(0))
    return DocumentCopies(made, torch.cat(crossed, 1))
