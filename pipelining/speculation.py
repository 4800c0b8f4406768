"""Speculative generation and its expected gain (RAGCache 5.3)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import count
from typing import Generic

from ragorder.common.running_mean import RunningMean
from ragorder.pipelining.load import Admission, EngineLoad
from ragorder.pipelining.protocols import AnswerChunk, R, StreamingEngine, Usage


async def counted(engine: StreamingEngine[R], request: R, load: EngineLoad | None) -> AsyncGenerator[AnswerChunk, None]:
    async with aclosing(engine.stream(request)) as stream:
        if load is None:
            async for chunk in stream:
                yield chunk
            return
        with load.prefilling(streamed=getattr(request, "streamed", True)) as started:
            async for chunk in stream:
                started()
                yield chunk


class Speculation(Generic[R]):
    """`off_engine` is called once the request has left the engine."""

    def __init__(
        self,
        engine: StreamingEngine[R],
        request: R,
        load: EngineLoad,
        admission: Admission,
        *,
        at_s: float,
        off_engine: Callable[[Speculation[R]], object] | None = None,
    ) -> None:
        self.request = request
        self.at_s = at_s
        self._answered = 0
        self._usage: Usage | None = None
        self._chunks: asyncio.Queue[AnswerChunk | None] = asyncio.Queue()
        self._error: Exception | None = None
        self._task = asyncio.create_task(self._generate(engine, load, admission))
        # A task that is cancelled at once never begins.
        self._task.add_done_callback(lambda _: admission.end())
        if off_engine is not None:
            self._task.add_done_callback(lambda _: off_engine(self))

    @property
    def tokens(self) -> tuple[int, int]:
        prompt, answer = self.request.prompt_tokens or 0, self._answered
        if (usage := self._usage) is not None:
            prompt, answer = usage.prompt_tokens or prompt, usage.completion_tokens or answer
        return prompt, answer

    @property
    def failed(self) -> bool:
        return self._error is not None

    def cancel(self) -> None:
        """Abort after the engine's iteration; `ended` waits for that."""
        # A second cancellation would interrupt the abort.
        if not self._task.cancelling():
            self._task.cancel()

    async def ended(self) -> None:
        await asyncio.wait((self._task,))

    async def chunks(self) -> AsyncGenerator[AnswerChunk, None]:
        try:
            while (chunk := await self._chunks.get()) is not None:
                yield chunk
            if self._error is not None:
                raise self._error
        finally:
            self.cancel()
            await self.ended()

    async def _generate(self, engine: StreamingEngine[R], load: EngineLoad, admission: Admission) -> None:
        try:
            # Sent requests are counted from here on; nothing else runs in between.
            admission.end()
            async with aclosing(counted(engine, self.request, load)) as stream:
                async for chunk in stream:
                    self._answered += chunk.tokens if chunk.text else 0
                    self._usage = chunk.usage or self._usage
                    self._chunks.put_nowait(chunk)
        except asyncio.CancelledError:
            if self._task.cancelling():
                raise
            # Part of an answer must not count as the whole.
            self._error = RuntimeError("the engine cancelled the request")
        except Exception as error:
            self._error = error
        finally:
            self._chunks.put_nowait(None)


class SpeculationGain:
    """Expected gain of a speculation by stage, learnt from all searches.

        pipeline = Pipeline(retrieval, prompts, engine, load=EngineLoad(4), gain=SpeculationGain())

    A right one saves the rest of the search, at most a prefill; a wrong one may keep the engine busy after the search.
    """

    def __init__(self) -> None:
        # For each stage: share of searches in which it had the final documents, and mean seconds left after it.
        self._stages: dict[int, tuple[RunningMean, RunningMean]] = {}

    def learn(self, stages: Sequence[tuple[bool, float]], numbers: Iterable[int] | None = None) -> None:
        for number, seen in zip(count(1) if numbers is None else numbers, stages, strict=False):
            if number not in self._stages:
                self._stages[number] = RunningMean(arithmetic_start=True), RunningMean(arithmetic_start=True)
            for mean, value in zip(self._stages[number], seen, strict=True):
                mean.add(value)

    def right(self, stage: int) -> float | None:
        return self._stages[stage][0].value if stage in self._stages else None

    def left_s(self, stage: int) -> float | None:
        return self._stages[stage][1].value if stage in self._stages else None

    def gain_s(self, stage: int, wasted_s: float, saved_s: float) -> float | None:
        """Return the mean seconds gained, or None before a search."""
        right, left_s = (mean.value for mean in self._stages.get(stage, (RunningMean(), RunningMean())))
        if right is None or left_s is None:
            return None
        return right * min(left_s, saved_s) - (1 - right) * max(0.0, wasted_s - left_s)

    def worthwhile(self, stage: int, prefill_s: float | None) -> bool:
        gain_s = None if prefill_s is None else self.gain_s(stage, prefill_s, prefill_s)
        return gain_s is None or gain_s >= 0
