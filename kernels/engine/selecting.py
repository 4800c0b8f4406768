"""Selection of a fused request's critical tokens, in steps among those of other requests (FusionRAG 3.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import torch

from ragorder.kernels.cache import KnowledgeCache
from ragorder.kernels.engine.kept_questions import KeptQuestions
from ragorder.kernels.engine.question import Question
from ragorder.kernels.engine.recovery import fault_of
from ragorder.kernels.engine.scattered import Positions, Spans
from ragorder.kernels.engine.scoring import Scene, Scorer
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.fusion.selection import make_selection
from ragorder.kernels.fusion.selection.base import top
from ragorder.kernels.fusion.settings import Fusion
from ragorder.kernels.paging import OutOfBlocksError

__all__ = ["TokenSelecting"]

_logger = logging.getLogger("ragorder.kernels.engine")


class TokenSelecting:
    """The selection among a sequence's tokens in `spans`, which were taken over, or with `anywhere` in all documents.

    `pending`: tokens of the next forward, of at most `most_tokens` where it can be cut; 0 in the end. Then `chosen` are
    the positions to recompute, ascending; or if it has failed, the request is to be computed `in_full`, and `chosen`
    may have been overwritten.
    """

    def __init__(
        self,
        sequence: Sequence,
        fusion: Fusion,
        spans: Spans,
        scorer: Scorer,
        cache: KnowledgeCache,
        questions: KeptQuestions,
        most_tokens: int,
    ) -> None:
        self.chosen: Positions = np.empty(0, dtype=np.int64)
        self.in_full = False
        self.pending = 0
        self._sequence = sequence
        self._fusion = fusion
        self._scorer = scorer
        self._cache = cache
        self._questions = questions
        self._most_tokens = most_tokens
        self._reused = sum(end - begin for begin, end in spans)
        self._spans = tuple(sequence.documents if fusion.anywhere else spans)
        self._steps = self._choose()
        self.compute()

    def compute(self) -> None:
        """Compute what is pending: at first nothing. Raises the errors of a failing device."""
        try:
            self.pending = next(self._steps, 0)
        except Exception as error:
            if fault_of(error) != "other":
                raise
            self._give_up(f"selection {self._fusion.select} has failed ({type(error).__name__})")

    def _choose(self) -> Iterator[int]:
        rounds = self._fusion.rounds
        budget = round(self._fusion.recompute * self._reused)
        selection = make_selection(self._fusion.select)
        everywhere = np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in self._spans])
        if selection.needs != "nothing" and (not budget or budget >= len(everywhere)):
            # There is nothing to measure.
            self.chosen = everywhere[:budget]
            return
        asked = self._questions.find(self._sequence) if selection.needs == "question" else None
        facts = yield from self._scorer.measuring(selection.needs, self._scene(asked), self._most_tokens)
        # Whatever a policy returns: rows outside are others', or computed anyway.
        chosen = np.intersect1d(everywhere, selection.choose(facts, -(-budget // rounds)).cpu().numpy())
        yield from self._make_writable(chosen)
        for number in range(2, rounds + 1):
            wanted = -(-budget * number // rounds)
            if not 0 < len(self.chosen) < wanted or self._too_many():
                continue
            documents = self._sequence.documents if self._fusion.as_if_last else ()
            attention = yield from self._scorer.attending(self._scene(), self.chosen, documents, self._most_tokens)
            scores = attention[facts.reused]
            scores[torch.isin(facts.reused, torch.from_numpy(self.chosen).to(scores.device))] = torch.inf
            yield from self._make_writable(top(facts, scores, wanted).cpu().numpy())
        if self._too_many():
            self._give_up(f"memory is short for {len(self.chosen)} tokens in one step")

    def _make_writable(self, chosen: Positions) -> Iterator[int]:
        """Take these. Those of the exact prefix get blocks of their own, or without room are left as they are."""
        prefix = chosen[chosen < self._exact_tokens]
        if len(prefix):
            # Until this step has run, another request may be computing them.
            yield 1
            lease = self._sequence.lease
            assert lease is not None
            try:
                self._cache.make_private(lease, prefix.tolist())
            except OutOfBlocksError:
                chosen = chosen[len(prefix) :]
            self._sequence.forget_table()
        self.chosen = chosen

    def _too_many(self) -> bool:
        # They share a step. If memory has been short, it is as small as the others.
        return self._fusion.as_if_last and self._most_tokens < min(len(self.chosen), self._scorer.most_tokens)

    def _give_up(self, why: str) -> None:
        _logger.error("%s: a request is computed in full", why)
        self.pending, self.in_full = 0, True

    @property
    def _exact_tokens(self) -> int:
        scattered = self._sequence.scattered
        assert scattered is not None
        return scattered.exact_tokens

    def _scene(self, asked: Question | None = None) -> Scene:
        sequence = self._sequence
        question = sequence.path_tokens, sequence.prompt_tokens
        table = sequence.table(self._cache.shape.block_size)
        prefix, exact = sequence.request.prefix_tokens, self._exact_tokens
        return Scene(sequence.tokens, table, prefix, exact, self._spans, question, asked=asked)
