"""Pipeline of retrieval and speculative prefill."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Any, Generic

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.protocols import (
    AnswerChunk,
    D,
    PipelineTrace,
    Q,
    R,
    RequestBuilder,
    StreamingEngine,
    Usage,
)
from ragorder.pipelining.retrieval import Retrieval
from ragorder.pipelining.servers import AnswerStream
from ragorder.pipelining.speculation import SpeculationGain
from ragorder.pipelining.warmup import WarmUp

_own_key: Callable[[Any], Hashable] = attrgetter("key")


class Pipeline(Generic[Q, D, R]):
    """Answers questions, starting before the final documents are found.

        pipeline = Pipeline(retrieval, prompts, engine, load=EngineLoad(4))
        async with pipeline.stream(question) as stream:
            async for text in stream: ...

    - `warm_up`: prefills an uncached system prompt during retrieval (RAGCache++ 3.6)
    - `load`: enables speculation (RAGCache 5.3, Algorithm 2); answers do not change
    - `gain`: restricts it to stages where it saved time in recent searches
    """

    def __init__(
        self,
        retrieval: Retrieval[Q, D],
        prompts: RequestBuilder[Q, D, R],
        engine: StreamingEngine[R],
        *,
        warm_up: WarmUp[Q] | None = None,
        load: EngineLoad | None = None,
        gain: SpeculationGain | None = None,
        key: Callable[[D], Hashable] = _own_key,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.warm_up = warm_up
        self.load = load
        self.gain = gain
        self._retrieval = retrieval
        self._prompts = prompts
        self._engine = engine
        self._key = key
        self._clock = clock

    def stream(self, question: Q) -> PipelinedStream:
        trace = PipelineTrace()
        return PipelinedStream(_QuestionRun(self, question, trace).run(), trace)

    async def answer(self, question: Q) -> PipelinedStream:
        async with self.stream(question) as stream:
            async for _ in stream:
                pass
        return stream

    async def close(self) -> None:
        if self.warm_up is not None:
            await self.warm_up.close()


class PipelinedStream(AnswerStream[AnswerChunk]):
    """Text of an answer; `usage` is the engine's report, at the end."""

    def __init__(self, chunks: AsyncGenerator[AnswerChunk, None], trace: PipelineTrace) -> None:
        super().__init__(chunks)
        self.trace = trace
        self.usage: Usage | None = None

    @property
    def tbt_s(self) -> float | None:
        """Mean seconds between tokens (RAGCache 5.4), or None if unknown or fewer than two."""
        first_s, last_s = self.trace.first_token_s, self.trace.last_token_s
        tokens = (self.usage and self.usage.completion_tokens) or 0
        return None if first_s is None or last_s is None or tokens < 2 else (last_s - first_s) / (tokens - 1)

    def _read(self, part: AnswerChunk) -> str:
        self.usage = part.usage or self.usage
        return part.text


class _QuestionRun(Generic[Q, D, R]):
    def __init__(self, pipeline: Pipeline[Q, D, R], question: Q, trace: PipelineTrace) -> None:
        self._pipeline = pipeline
        self._question = question
        self._trace = trace
        self._start_s = 0.0
        self._keys: tuple[Hashable, ...] | None = None
        self._attempt = Attempt(pipeline._engine, pipeline._prompts, pipeline.load, trace, self._elapsed_s)

    async def run(self) -> AsyncGenerator[AnswerChunk, None]:
        self._start_s = self._pipeline._clock()
        try:
            documents = await self._retrieve()
            async with aclosing(self._attempt.answer(self._question, documents)) as chunks:
                async for chunk in chunks:
                    yield chunk
            self._trace.total_s = self._elapsed_s()
        finally:
            await self._attempt.abort()

    def _elapsed_s(self) -> float:
        return self._pipeline._clock() - self._start_s

    async def _retrieve(self) -> Sequence[D]:
        pipeline, trace = self._pipeline, self._trace
        warming = pipeline.warm_up.start(self._question) if pipeline.warm_up is not None else None
        trace.warmed_up = warming is not None
        documents: Sequence[D] = ()
        seen: list[tuple[tuple[Hashable, ...], float]] = []
        try:
            async with aclosing(pipeline._retrieval(self._question)) as stages:
                async for stage in stages:
                    trace.stages += 1
                    documents = stage.documents
                    if stage.final:
                        break
                    seen.append((self._keys_of(documents), self._elapsed_s()))
                    if pipeline.load is not None:
                        await self._speculate(documents, pipeline.load)
        finally:
            if warming is not None:
                warming.leave()
        trace.retrieval_s = trace.exposed_search_s = ended_s = self._elapsed_s()
        if pipeline.gain is not None and seen:
            final = self._keys_of(documents)
            pipeline.gain.learn([(keys == final, ended_s - at_s) for keys, at_s in seen])
        return documents

    def _keys_of(self, documents: Sequence[D]) -> tuple[Hashable, ...]:
        return tuple(map(self._pipeline._key, documents))

    async def _speculate(self, documents: Sequence[D], load: EngineLoad) -> None:
        keys, gain = self._keys_of(documents), self._pipeline.gain
        if keys != self._keys:
            speculates = await self._attempt.speculate(
                self._question,
                documents,
                load,
                lambda: gain is None or gain.worthwhile(self._trace.stages, load.prefill_s),
            )
            self._keys = keys if speculates else None
