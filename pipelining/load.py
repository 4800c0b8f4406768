"""How busy the engine is: whether a speculative prefill would be in anybody's way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragorder.pipelining.running_mean import RunningMean

__all__ = ["EngineLoad", "prefill_batch"]


def prefill_batch(token_budget: int, prompt_tokens: int) -> int:
    """How many prompts of this length one prefill iteration of the engine takes: `max_prefill_bs` of RAGCache section
    5.3, for an engine that computes `token_budget` tokens an iteration (vLLM: --max-num-batched-tokens)."""
    return max(1, token_budget // max(1, prompt_tokens))


class EngineLoad:
    """Counts the requests that wait for their first token (the queue of RAGCache Algorithm 2).

    There is room for a speculation while fewer than `max_prefill_bs` are pending. `reported` may say how many the
    engine itself knows of, those of others included (None: it does not say): the larger number counts. `clock` gives
    seconds.

    Raises ValueError for less than one.
    """

    def __init__(
        self,
        max_prefill_bs: int,
        reported: Callable[[], int | None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if max_prefill_bs < 1:
            raise ValueError(f"max_prefill_bs must be at least 1, got {max_prefill_bs}")
        self.max_prefill_bs = max_prefill_bs
        self._reported = reported
        self._pending = 0
        self._clock = clock
        self._prefill_s = RunningMean(arithmetic_start=True)

    @property
    def prefill_s(self) -> float | None:
        """The mean of the last times to a first token, from when a request was sent; None before the first."""
        return self._prefill_s.value

    @property
    def pending(self) -> int:
        """Requests that wait for their first token."""
        reported = self._reported() if self._reported is not None else None
        return max(self._pending, reported or 0)

    @property
    def has_room(self) -> bool:
        """Whether one more prefill would not make others wait."""
        return self.pending < self.max_prefill_bs

    @contextmanager
    def prefilling(self) -> Iterator[Callable[[], None]]:
        """A request is sent. Call what you get once its first token is there; if none comes, leaving the block does."""
        waits = True
        self._pending += 1
        sent_s = self._clock()

        def ended() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._pending -= 1

        def started() -> None:
            if waits:
                self._prefill_s.add(self._clock() - sent_s)
                ended()

        try:
            yield started
        finally:
            ended()
