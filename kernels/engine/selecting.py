"""Start of fused requests, and selection in steps (FusionRAG 3.2, 4.3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import torch

from ragorder.kernels.cache import Borrowed, KnowledgeCache, content_of
from ragorder.kernels.engine.request import Request, fault_of
from ragorder.kernels.engine.scoring import Question, Scorer, ScoringInput
from ragorder.kernels.engine.sequence import Positions, Sequence, Spans
from ragorder.kernels.engine.stats import EngineCounters
from ragorder.kernels.fusion.assemble import Layout
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.fusion.selection import Fusion, make_selection, top
from ragorder.kernels.models.support import UnsupportedModelError, text_config


class KeptQuestions:
    """Vectors of the latest questions after a system prompt, up to `most_tokens`, for `seconds`."""

    def __init__(
        self,
        scorer: Scorer,
        block_size: int,
        counters: EngineCounters,
        *,
        most_tokens: int = 8192,
        seconds: float = 60.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._scorer = scorer
        self._block_size = block_size
        self._counters = counters
        self._most_tokens = most_tokens
        self._seconds = seconds
        self._clock = clock
        self._entries: dict[bytes, tuple[float, Question]] = {}
        self._tokens = 0

    def __len__(self) -> int:
        self._drop()
        return len(self._entries)

    def keep(self, sequence: Sequence) -> None:
        start, end = sequence.path_tokens, sequence.prompt_tokens
        if not 0 < sequence.request.prefix_tokens == start < end:
            return
        inputs = ScoringInput(sequence.tokens, sequence.table(self._block_size), start, start, (), (start, end))
        try:
            question = self._scorer.read(inputs, start)
        except Exception as error:
            # The following request computes it itself.
            _logger.error("a question could not be computed ahead (%s)", type(error).__name__)
            return
        key = self._key(sequence)
        self._remove(key)
        self._entries[key] = self._clock() + self._seconds, question
        self._tokens += len(question.keys)
        self._counters.questions_kept += 1
        self._drop()

    def find(self, sequence: Sequence) -> Question | None:
        self._drop()
        if not self._entries:
            return None
        _, question = self._entries.get(self._key(sequence), (0.0, None))
        self._counters.questions_used += question is not None
        return question

    def clear(self) -> None:
        self._entries.clear()
        self._tokens = 0

    def _key(self, sequence: Sequence) -> bytes:
        tokens, request = sequence.tokens, sequence.request
        question = tokens[sequence.path_tokens : sequence.prompt_tokens]
        return content_of(tokens[: request.prefix_tokens], question, salt=request.salt)

    def _drop(self) -> None:
        # All are kept for the same time, so the first is the oldest.
        now = self._clock()
        for key, (until, _) in list(self._entries.items()):
            if until > now and self._tokens <= self._most_tokens:
                return
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._tokens -= len(entry[1].keys)


_logger = logging.getLogger("ragorder.kernels.engine")


class TokenSelecting:
    """Selection among a sequence's reused tokens in `spans`. The next forward has `pending` tokens, 0 at the end. Then
    `chosen` has the positions to recompute, ascending; after a failure the request is computed `in_full`."""

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
        self._spans = tuple(spans)
        self._steps = self._choose()
        self.compute()

    def compute(self) -> None:
        try:
            self.pending = next(self._steps, 0)
        except Exception as error:
            if fault_of(error) != "other":
                raise
            select = self._fusion.select
            name = select if isinstance(select, str) else type(select).__name__
            _logger.error("selection %s failed (%s): computing the request in full", name, type(error).__name__)
            self.pending, self.in_full = 0, True

    def _choose(self) -> Iterator[int]:
        budget = round(self._fusion.recompute * self._reused)
        selection = make_selection(self._fusion.select)
        everywhere = np.concatenate([np.arange(begin, end, dtype=np.int64) for begin, end in self._spans])
        if not budget or budget >= len(everywhere):
            # There is nothing to measure.
            self.chosen = everywhere[:budget]
            return
        asked = self._questions.find(self._sequence) if selection.needs == "question" else None
        measurements = yield from self._scorer.measuring(selection.needs, self._inputs(asked), self._most_tokens)
        rounds = self._fusion.rounds
        # A policy may return any positions.
        self.chosen = np.intersect1d(everywhere, selection.choose(measurements, -(-budget // rounds)).cpu().numpy())
        for number in range(2, rounds + 1):
            wanted = -(-budget * number // rounds)
            if not 0 < len(self.chosen) < wanted:
                continue
            self._sequence.take(self.chosen)
            attention = yield from self._scorer.attending(self._inputs(), self.chosen, self._most_tokens)
            scores = attention[measurements.reused]
            scores[torch.isin(measurements.reused, torch.from_numpy(self.chosen).to(scores.device))] = torch.inf
            self.chosen = top(measurements, scores, wanted).cpu().numpy()

    @property
    def _exact_tokens(self) -> int:
        scattered = self._sequence.scattered
        assert scattered is not None
        return scattered.exact_tokens

    def _inputs(self, asked: Question | None = None) -> ScoringInput:
        sequence = self._sequence
        question = sequence.path_tokens, sequence.prompt_tokens
        table = sequence.table(self._cache.shape.block_size)
        prefix, exact = sequence.request.prefix_tokens, self._exact_tokens
        places = sequence.places(sequence.prompt_tokens, self._cache.shape.block_size)
        return ScoringInput(sequence.tokens, table, prefix, exact, self._spans, question, asked, places)


def check_fusion(model: Any) -> None:
    """Raises UnsupportedModelError for a model with a sliding window."""
    config = text_config(model)
    types = getattr(config, "layer_types", None)
    if "sliding_attention" in types if types else getattr(config, "sliding_window", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) cannot be fused: it has layers with a sliding window; "
            "reuse='exact' serves it"
        )


class Fuser:
    def __init__(self, cache: KnowledgeCache, rotation: Rotation, scorer: Scorer, questions: KeptQuestions) -> None:
        self._cache = cache
        self._rotation = rotation
        self._scorer = scorer
        self._questions = questions

    def helpers(self, sequence: Sequence) -> list[Sequence]:
        """Return sequences that compute documents without KV after the first borrowed one, each after the system prompt
        alone: after approximate KV they would serve this request only."""
        lease, path = sequence.lease, sequence.path
        assert lease is not None
        if not lease.borrowed:
            return []
        first = min(each.start for each in lease.borrowed)
        front = path[:1] if not path[0].content else ()
        prefix = sequence.tokens[: sum(segment.tokens for segment in front)]
        helpers, start = [], 0
        # A document with KV that the pool has no room for is computed in place.
        for segment, known in zip(path, self._cache.have_copies(path), strict=True):
            end = start + segment.tokens
            if start > first and not known:
                request = Request([*prefix, *sequence.tokens[start:end]])
                alone = (*front, segment._replace(key=segment.content))
                helpers.append(Sequence(-1, request, alone, None, frozenset(), owner=sequence))
            start = end
        return helpers

    def room(self, sequence: Sequence) -> int:
        """Return the tokens that need own blocks before the sequence begins."""
        borrowed = sequence.lease.borrowed if sequence.lease is not None else []
        if sequence.fusion is None or not borrowed:
            return len(sequence.tokens)
        reused = sum(each.tokens for each in borrowed)
        return len(sequence.tokens) - reused + round(sequence.fusion.recompute * reused)

    def begin(self, sequence: Sequence, most_tokens: int) -> None:
        """Share borrowed documents and begin to select, in forwards of at most `most_tokens`."""
        lease, fusion = sequence.lease, sequence.fusion
        assert lease is not None
        if fusion is None or not lease.borrowed:
            return
        own = sequence.standalone or frozenset()
        borrowed = lease.borrowed
        found = [_span(each) for each in borrowed if each.copy.node.key not in own]
        spans = list(map(_span, borrowed))
        layout = Layout(len(sequence.tokens), spans, self._rotation)
        sequence.reuse(layout, spans, found, self._cache.count_borrowed(lease, own))
        sequence.selecting = TokenSelecting(
            sequence, fusion, spans, self._scorer, self._cache, self._questions, most_tokens
        )
        self.advance(sequence)

    def advance(self, sequence: Sequence) -> None:
        if sequence.selecting is not None and not sequence.selecting.pending:
            sequence.choose(sequence.selecting.chosen, in_full=sequence.selecting.in_full)
            sequence.selecting = None
            if sequence.layout is None and sequence.lease is not None:
                self._cache.give_back(sequence.lease)


def _span(borrowed: Borrowed) -> tuple[int, int]:
    return borrowed.start, borrowed.start + borrowed.tokens
