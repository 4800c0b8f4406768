"""Generation with speculations on provisional documents (RAGCache 5.3)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Generic

from ragorder.pipelining.load import Admission, EngineLoad
from ragorder.pipelining.protocols import (
    AnswerChunk,
    D,
    PipelineTrace,
    Q,
    R,
    RequestBuilder,
    StreamingEngine,
)
from ragorder.pipelining.speculation import Speculation, counted

_logger = logging.getLogger("ragorder")


class Attempt(Generic[Q, D, R]):
    """One generation: speculations, and the answer, which uses one of an equal request."""

    def __init__(
        self,
        engine: StreamingEngine[R],
        prompts: RequestBuilder[Q, D, R],
        load: EngineLoad | None,
        trace: PipelineTrace,
        elapsed_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._load = load
        self._trace = trace
        self._elapsed_s = elapsed_s
        self._speculation: Speculation[R] | None = None
        self._aborted: list[Speculation[R]] = []

    async def speculate(
        self,
        question: Q,
        documents: Sequence[D],
        load: EngineLoad,
        worthwhile: Callable[[], bool],
        admit: Callable[[], Admission | None] | None = None,
        off_engine: Callable[[Speculation[R]], object] | None = None,
    ) -> bool:
        """Begin a speculation if worthwhile (Algorithm 2, lines 6-10). Return False to try again later. `admit` may
        return an earlier admission."""
        trace = self._trace
        try:
            request = self._prompts.preview(question, documents)
        except Exception as error:
            _logger.warning("no speculation: %s", type(error).__name__)
            await self.abort()
            return False
        if self._speculation is not None and self._speculation.request == request:
            return True
        await self.abort()
        admission = load.admit() if admit is None else admit()
        if admission is None:
            trace.refused += 1
            return False
        if not worthwhile():
            admission.end()
            trace.declined += 1
            return False
        trace.speculations += 1
        trace.speculated_stage = trace.stages
        self._speculation = Speculation(
            self._engine, request, load, admission, at_s=self._elapsed_s(), off_engine=off_engine
        )
        return True

    def speculates_on(self, question: Q, documents: Sequence[D]) -> bool:
        speculation = self._speculation
        if speculation is None or speculation.failed:
            return False
        try:
            return bool(speculation.request == self._prompts.preview(question, documents))
        except Exception:
            # The answer raises the error itself.
            return False

    async def abort(self) -> None:
        self._drop()
        while self._aborted:
            # A caller that is cancelled here aborts again: it must not return before the engine is done.
            await self._aborted[-1].ended()
            self._aborted.pop()

    async def answer(self, question: Q, documents: Sequence[D]) -> AsyncGenerator[AnswerChunk, None]:
        committed = self._prompts.commit(question, documents)
        usage, began = None, False
        try:
            async with aclosing(self._generate(committed.request)) as chunks:
                async for chunk in chunks:
                    if chunk.text or not began:
                        self._trace.last_token_s = self._elapsed_s()
                    if not began:
                        began = True
                        self._trace.first_token_s = self._trace.last_token_s
                    usage = chunk.usage or usage
                    yield chunk
        except BaseException:
            # The prompt is cached once it is computed, even if the answer failed.
            if began:
                committed.confirm(usage)
            else:
                committed.discard()
            raise
        committed.confirm(usage)

    async def _generate(self, request: R) -> AsyncGenerator[AnswerChunk, None]:
        speculation = self._speculation
        if speculation is not None and not speculation.failed and speculation.request == request:
            self._speculation = None
            began = False
            try:
                async with aclosing(speculation.chunks()) as chunks:
                    async for chunk in chunks:
                        if not began:
                            began = self._trace.right = True
                            self._trace.exposed_search_s = speculation.at_s
                        yield chunk
                return
            except Exception:
                # The request may succeed if it is sent again, without speculation.
                if began:
                    raise
        # A wrong speculation ends while the final request runs.
        self._drop()
        self._trace.speculated_stage = None
        async with aclosing(counted(self._engine, request, self._load)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _drop(self) -> None:
        if (speculation := self._speculation) is not None:
            self._speculation = None
            self._aborted.append(speculation)
            speculation.cancel()
            self._trace.wasted_prompt_tokens += speculation.request.prompt_tokens or 0
