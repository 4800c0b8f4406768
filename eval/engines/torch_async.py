"""The embedded engine under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragorder.eval.engines.base import EngineCompletion, EngineError, RequestError
from ragorder.eval.engines.torch import TorchEngine

if TYPE_CHECKING:
    from ragorder.kernels.engine import Completion

__all__ = ["AsyncTorchEngine"]

_Answer = asyncio.Future[EngineCompletion]


class AsyncTorchEngine:
    """A `TorchEngine` for concurrent requests, which join between steps. Steps run in a thread."""

    def __init__(self, engine: TorchEngine) -> None:
        self.name = engine.name
        self.block_size = engine.block_size
        self.capacity_tokens = engine.capacity_tokens
        self.kept_output_tokens = engine.kept_output_tokens
        self.partial_blocks_first = engine.partial_blocks_first
        self._engine = engine
        self._arrived: list[tuple[Sequence[int], int | None, float, _Answer]] = []
        self._running: dict[int, tuple[float, _Answer]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def complete(self, token_ids: Sequence[int], output_tokens: int | None = None) -> EngineCompletion:
        """`ttft_s` includes the wait for the current step. Raises RequestError for a refused prompt, EngineError for a
        failed step."""
        answer: _Answer = asyncio.get_running_loop().create_future()
        self._arrived.append((token_ids, output_tokens, time.perf_counter(), answer))
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step())
        return await answer

    async def _step(self) -> None:
        engine = self._engine.engine
        try:
            while self._arrived or self._running:
                self._admit()
                if not self._running:
                    continue
                for update in await asyncio.to_thread(engine.step):
                    if update.completion is not None:
                        self._end(update.completion)
        except Exception as error:  # whatever ends the engine ends the run, and not in silence
            self._fail(EngineError(f"a step of the engine failed ({type(error).__name__}: {error})"))
        finally:
            self._stepping = None

    def _admit(self) -> None:
        arrived, self._arrived = self._arrived, []
        for token_ids, output_tokens, at, answer in arrived:
            try:
                number = self._engine.engine.add(self._engine.request(token_ids, output_tokens))
            except ValueError as error:
                answer.set_exception(RequestError(str(error)))
            else:
                self._running[number] = (time.perf_counter() - at, answer)

    def _end(self, served: Completion) -> None:
        waited_s, answer = self._running.pop(served.request_id)
        if answer.done():
            return
        try:
            completion = self._engine.completion(served)
        except EngineError as error:
            answer.set_exception(RequestError(str(error)))
            return
        assert completion.ttft_s is not None and completion.total_s is not None
        answer.set_result(
            EngineCompletion(
                waited_s + completion.ttft_s,
                completion.cached_tokens,
                completion.prompt_tokens,
                completion.text,
                waited_s + completion.total_s,
                completion.tbt_s,
            )
        )

    def _fail(self, error: EngineError) -> None:
        answers = [arrived[-1] for arrived in self._arrived] + [running[-1] for running in self._running.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
        self._arrived, self._running = [], {}
