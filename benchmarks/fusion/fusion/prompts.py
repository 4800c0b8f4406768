"""Questions answered together, in each of the ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragorder.benchmarks.fusion.fusion.arms import Arm
from ragorder.benchmarks.fusion.fusion.copies import DocumentCopies, make_copies
from ragorder.benchmarks.fusion.fusion.model import ChainModel, previous
from ragorder.benchmarks.fusion.fusion.questions import QUESTION_TOKENS, Questions
from ragorder.benchmarks.fusion.fusion.reference import Computed, ReferenceKV, compute, compute_prompts

__all__ = ["Prompts"]

_DEVIATION_LAYER = 1
T = TypeVar("T")


@dataclass
class Prompts:
    """`neighbours`: how many similar documents preprocessing takes; `seed`: of random choices."""

    model: ChainModel
    questions: Questions
    neighbours: int
    seed: int
    _kept: dict[object, object] = field(default_factory=dict)

    def right(self, arm: Arm, ratio: float) -> Tensor:
        """float (questions,): 1 for each right answer."""
        count = self.budget(arm, ratio)
        first, end = self._candidates(arm)
        if count == end - first:
            # Whatever the copies were.
            arm = Arm()
            count = self.reused_tokens(arm)
        # Whatever is selected, nothing and everything are the same.
        select = (arm.select, arm.rounds) if 0 < count < self.reused_tokens(arm) else None
        key = ("right", arm.copies, arm.exact, count, select)
        return self._once(key, lambda: (self.answer(arm, count).argmax(-1) == self.questions.values).float())

    def answer(self, arm: Arm, count: int) -> Tensor:
        """Logits (questions, vocabulary) with so many of the reused tokens recomputed."""
        slots = self.selected(arm, count) if count else None
        return self.model.logits(self._compute(arm, slots).hidden[:, -1])

    def budget(self, arm: Arm, ratio: float) -> int:
        return round(ratio * self.reused_tokens(arm))

    def reused_tokens(self, arm: Arm) -> int:
        return 1 + self.questions.level.tokens - self._first_reused(arm)

    def selected(self, arm: Arm, count: int) -> Tensor:
        """int64 (questions, count): positions in the prompts, sorted."""
        ranked = self._once(("ranked", arm.select, arm.copies, arm.exact), lambda: self._ranked(arm))
        chosen = ranked[:, : -(-count // arm.rounds)].sort(1).values
        for number in range(2, arm.rounds + 1):
            attention = self._compute(arm, chosen).attention
            looked = torch.stack(attention).mean((0, 2))[:, : chosen.shape[1]].sum(1)
            first, end = self._candidates(arm)
            score = looked.scatter(1, chosen, torch.inf)[:, first:end]
            more = first + score.argsort(stable=True, dim=1, descending=True)
            chosen = more[:, : -(-count * number // arm.rounds)].sort(1).values
        return chosen

    def deviation(self, arm: Arm) -> Tensor:
        """(questions, document tokens): squared, of the reused KV in the second layer from that of full attention."""
        reused, full, layer = self._reused(arm), self._full.kv, _DEVIATION_LAYER
        squares = [
            (ours[layer] - theirs[layer]).square().sum((1, 3))
            for ours, theirs in ((reused.keys, full.keys), (reused.values, full.values))
        ]
        return (squares[0] + squares[1])[:, 1 : 1 + self.questions.level.tokens]

    def _first_reused(self, arm: Arm) -> int:
        level = self.questions.level
        return 1 + round(arm.exact * level.documents) * level.document_tokens

    def _candidates(self, arm: Arm) -> tuple[int, int]:
        """Positions that may be selected."""
        return self._first_reused(arm), 1 + self.questions.level.tokens

    def _ranked(self, arm: Arm) -> Tensor:
        first, end = self._candidates(arm)
        return first + self._score(arm)[:, first:end].argsort(stable=True, dim=1, descending=True)

    def _score(self, arm: Arm) -> Tensor:
        """(questions, tokens of the prompt or fewer)"""
        level, prompts = self.questions.level, len(self.questions)
        if arm.select == "query":
            return self._compute(arm, None).attention[-1].sum(2).mean(1)
        if arm.select == "deviation":
            score = self.deviation(arm)
        elif arm.select == "inter":
            score = self._made(arm).crossed
        elif arm.select == "head":
            score = -(torch.arange(level.tokens) % level.document_tokens).float().expand(prompts, -1)
        else:
            score = torch.rand(prompts, level.tokens, generator=torch.Generator().manual_seed(self.seed))
        return pad(score, (1, 0))

    def _compute(self, arm: Arm, slots: Tensor | None) -> Computed:
        tokens = self._tokens
        rows = torch.arange(tokens.shape[1] - QUESTION_TOKENS, tokens.shape[1]).expand(len(tokens), -1)
        if slots is not None:
            rows = torch.cat([slots, rows], 1)
        return compute(
            self.model,
            tokens.gather(1, rows),
            previous(tokens).gather(1, rows),
            rows,
            self._reused(arm),
        )

    def _reused(self, arm: Arm) -> ReferenceKV:
        """All documents' KV before anything is recomputed."""

        def put_together() -> ReferenceKV:
            first = self._first_reused(arm)
            copies = self._made(arm).kv[first // self.questions.level.document_tokens :]
            question = ReferenceKV.empty(self.model, len(self.questions), QUESTION_TOKENS)
            return ReferenceKV.joined(self._full.kv.part(0, first), *copies, question)

        return self._once(("reused", arm.copies, arm.exact), put_together)

    def _made(self, arm: Arm) -> DocumentCopies:
        return self._once(
            arm.copies, lambda: make_copies(self.model, self.questions, arm.copies, self.neighbours, self.seed)
        )

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    @cached_property
    def _tokens(self) -> Tensor:
        return self.questions.prompts

    @cached_property
    def _full(self) -> Computed:
        return compute_prompts(self.model, self._tokens)
