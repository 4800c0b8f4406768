"""Questions whose vectors were computed while their documents were searched for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic

from ragorder.kernels.cache import content_of
from ragorder.kernels.engine.question import Question
from ragorder.kernels.engine.scoring import Scene, Scorer
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine.stats import EngineCounters

__all__ = ["KeptQuestions"]

_logger = logging.getLogger("ragorder.kernels.engine")


class KeptQuestions:
    """Vectors of questions directly behind a system prompt, by tenant and tokens, for `seconds`: the latest ones, of
    `most_tokens` together."""

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
        """Of a warm-up whose prompt is computed: a system prompt and the question."""
        start, end = sequence.path_tokens, sequence.prompt_tokens
        if not 0 < sequence.request.prefix_tokens == start < end:
            return
        scene = Scene(sequence.tokens, sequence.table(self._block_size), start, start, (), (start, end))
        try:
            question = self._scorer.read(scene, start)
        except Exception as error:
            # The request that follows reads it itself.
            _logger.error("a question could not be read ahead (%s)", type(error).__name__)
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
        # All are kept equally long, so the oldest is the first.
        now = self._clock()
        for key, (until, _) in list(self._entries.items()):
            if until > now and self._tokens <= self._most_tokens:
                return
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self._tokens -= len(entry[1].keys)
