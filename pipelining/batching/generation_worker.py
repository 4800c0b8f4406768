"""Workers for the generation queue."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Generic, NamedTuple

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.batching.batchers import Backlog
from ragorder.pipelining.batching.kv import Context, KVTokens, largest_prefix
from ragorder.pipelining.batching.requests import BatchedRequest
from ragorder.pipelining.batching.worker import Occupancy, Worker
from ragorder.pipelining.protocols import D, Q, R, RequestBuilder, StreamingEngine
from ragorder.pipelining.servers import end_all


class GenerationWorker(Worker[Q, D], Generic[Q, D, R]):
    """Runs requests with at most `kv_limit` tokens of `kv`, except for a single one."""

    name = "generation"

    def __init__(
        self,
        engine: StreamingEngine[R],
        prompts: RequestBuilder[Q, D, R],
        *,
        kv: KVTokens[Q, D] | None,
        kv_limit: int | None,
        arrivals_s: Callable[[], Sequence[float]],
        made_room: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.kv_limit = kv_limit
        self._engine = engine
        self._prompts = prompts
        self._kv = kv
        self._arrivals_s = arrivals_s
        self._made_room = made_room
        self._tasks: dict[BatchedRequest[Q, D], asyncio.Task[_Outcome]] = {}

    def upcoming(self, count: int) -> Sequence[BatchedRequest[Q, D]]:
        own = [request for request in self.running if not request.sent][:count]
        return [*own, *super().upcoming(count - len(own))]

    async def end(self, request: BatchedRequest[Q, D]) -> None:
        task = self._tasks.get(request)
        if task is not None:
            await end_all((task,))

    async def _end_running(self) -> None:
        await end_all(self._tasks.values())

    def _kv_tokens(self) -> int | None:
        return self._kv_of(self.running)

    def _fits(self, requests: Iterable[BatchedRequest[Q, D]]) -> bool:
        tokens = self._kv_of(requests)
        return tokens is None or self.kv_limit is None or tokens <= self.kv_limit

    def _kv_of(self, requests: Iterable[BatchedRequest[Q, D]]) -> int | None:
        if self._kv is None or self.kv_limit is None:
            return None
        # Without lengths requests run without the limit.
        contexts = [Context(request.question, request.documents) for request in requests]
        return self._warn.guard("kv_tokens", self._kv, contexts)

    def _start_request(self, request: BatchedRequest[Q, D]) -> None:
        request.trace.generation_began_s = self._clock()
        request.peak, request.sent = 0, False
        for each in self.running:
            each.peak = max(each.peak, len(self.running))
            each.trace.generation_batch = max(each.trace.generation_batch, len(self.running))
        self._made_room()
        task = self._tasks[request] = asyncio.create_task(self._generate(request))
        # A task that is cancelled before its first step runs none of its own code.
        task.add_done_callback(lambda done: self._over(request, done))

    async def _generate(self, request: BatchedRequest[Q, D]) -> _Outcome:
        try:
            await self._answer(request)
        except Exception as error:
            return _Outcome(error, await self.degradation.retries(request, request.peak, error, shared=False))
        return _Outcome()

    async def _answer(self, request: BatchedRequest[Q, D]) -> None:
        request.begin_answer()
        began_s, trace = self._clock(), request.trace
        attempt: Attempt[Q, D, R] = Attempt(
            self._engine, self._prompts, None, trace.generation, lambda: self._clock() - began_s
        )
        async with aclosing(attempt.answer(request.question, request.documents)) as chunks:
            async for chunk in chunks:
                request.add(chunk)
        if trace.generation.first_token_s is not None:
            trace.first_token_s = began_s + trace.generation.first_token_s

    def _over(self, request: BatchedRequest[Q, D], task: asyncio.Task[_Outcome]) -> None:
        """Runs without an await, so that a rerun is never counted twice."""
        del self._tasks[request]
        outcome = _Outcome(_cut_off(task)) if task.cancelled() or task.exception() else task.result()
        if outcome.retries and not request.abandoned:
            self._put_back(request)
        else:
            self._drop(request)
            if outcome.error is not None:
                request.fail(outcome.error, self._clock())
            else:
                request.finish(self._clock())
                self.degradation.succeeded(request.peak)
        self._ended(request, outcome.error)
        self.wake()

    @abstractmethod
    def _ended(self, request: BatchedRequest[Q, D], error: BaseException | None) -> None: ...


class _Outcome(NamedTuple):
    error: BaseException | None = None
    retries: bool = False


class JoiningGenerationWorker(GenerationWorker[Q, D, R]):
    """For an engine that lets requests join between two steps."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._occupancy: Occupancy[BatchedRequest[Q, D]] = Occupancy(self._clock)

    async def _serve(self) -> bool:
        if self._hooks:
            # Hooks wait until nothing runs.
            return False
        if not self._queue:
            return False
        # Choose before lengths are read, which takes longer.
        if self.running and len(self.running) >= self._choose(min(each.most for each in self.running)):
            return False
        ticket = self._queue.peek()
        request = ticket.item
        most = min(each.most for each in (*self.running, request))
        size = self._choose(most)
        if len(self.running) >= size:
            return False
        if self.running and not self._fits((*self.running, request)):
            return False
        self._occupancy.begin(self._take(ticket))
        self._start_request(request)
        self._event("began")
        # The next choice must see this request's effect on the cache, and other tasks need a turn.
        await asyncio.sleep(0)
        return True

    def _ended(self, request: BatchedRequest[Q, D], error: BaseException | None) -> None:
        seconds: float | None = None
        if (ran := self._occupancy.end(request)) is not None:
            running, seconds = ran
            if error is None and not request.abandoned and seconds > 0:
                self._learn(running, seconds)
        self._event("ended" if error is None else "failed", seconds)


class StaticGenerationWorker(GenerationWorker[Q, D, R]):
    """For an engine that computes each batch to its end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._batch_size = 0
        self._batch_failed = False
        self._began_s = 0.0

    def _policy_size(self) -> int:
        # Requests that arrive during a batch wait for its end, so a smaller one may be better.
        return self.batcher.size(Backlog(self.waiting, 0, self._arrivals_s()))

    async def _serve(self) -> bool:
        if self._hooks or self.running:
            return False
        batch = self._next_batch()
        if not batch:
            return False
        self._batch_size, self._batch_failed, self._began_s = len(batch), False, self._clock()
        for request in batch:
            self._start_request(request)
        self._event("began")
        return True

    def _next_batch(self) -> list[BatchedRequest[Q, D]]:
        size = self._choose(self.waiting)
        batch: list[BatchedRequest[Q, D]] = []
        while self._queue and len(batch) < size:
            ticket = self._queue.peek()
            size = min(size, ticket.item.most)
            if len(batch) >= size:
                break
            batch.append(self._take(ticket))
        fitting = largest_prefix(len(batch), lambda count: self._fits(batch[:count])) if batch else 0
        for request in reversed(batch[fitting:]):
            self._put_back(request)
        return batch[:fitting]

    def _ended(self, request: BatchedRequest[Q, D], error: BaseException | None) -> None:
        self._batch_failed |= error is not None or request.abandoned
        if not self.running:
            seconds = self._clock() - self._began_s
            if not self._batch_failed:
                self._learn(self._batch_size, seconds)
            self._event("failed" if self._batch_failed else "ended", seconds)


def _cut_off(task: asyncio.Task[Any]) -> BaseException:
    if task.cancelled():
        return RuntimeError("the generation was cancelled by the engine")
    return task.exception() or RuntimeError("the generation ended without an answer")
