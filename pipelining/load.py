"""Load of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.servers import FirstFailures


def prefill_batch(token_budget: int, prompt_tokens: int) -> int:
    """Return RAGCache's `max_prefill_bs` (5.3): prompts in an iteration of `token_budget` tokens."""
    return max(1, token_budget // max(1, prompt_tokens))


class EngineLoad:
    """Requests that wait for their first token: the queue of RAGCache's Algorithm 2.

        load = EngineLoad(prefill_batch(8192, prompt_tokens=2000))

    Speculations are admitted while fewer than `max_prefill_bs` are pending. `reported`: the engine's own count, with
    other clients' requests; the larger one is used.
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
        self.admitted = 0
        self._reported = reported
        self._pending = 0
        self._clock = clock
        self._prefill_s = RunningMean(arithmetic_start=True)
        self._warn = FirstFailures()

    @property
    def prefill_s(self) -> float | None:
        return self._prefill_s.value

    @property
    def pending(self) -> int:
        reported = None
        if self._reported is not None:
            reported = self._warn.guard("the engine's report", self._reported)
        return max(self._pending, reported or 0) + self.admitted

    @property
    def has_room(self) -> bool:
        return self.pending < self.max_prefill_bs

    def admit(self) -> Admission | None:
        return Admission(self) if self.has_room else None

    @contextmanager
    def prefilling(self, *, streamed: bool = True) -> Iterator[Callable[[], None]]:
        """Count a request as pending until its first token or, if not `streamed`, for the mean prefill."""
        waits = True
        self._pending += 1
        sent_s = self._clock()

        def ended() -> None:
            nonlocal waits
            if waits:
                waits = False
                self._pending -= 1

        def started() -> None:
            if waits and streamed:
                self._prefill_s.add(self._clock() - sent_s)
                ended()

        expected = None if streamed else asyncio.get_running_loop().call_later(self.prefill_s or 0.0, ended)
        try:
            yield started
        finally:
            if expected is not None:
                expected.cancel()
            ended()


class Admission:
    """An unsent request, pending until `end`."""

    __slots__ = ("_load",)

    def __init__(self, load: EngineLoad) -> None:
        self._load: EngineLoad | None = load
        load.admitted += 1

    def end(self) -> None:
        """Stop counting it. May be called again."""
        load, self._load = self._load, None
        if load is not None:
            load.admitted -= 1
