"""Batches of questions, sent from a cache-aware queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterable, Sequence
from functools import cache
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

from ragorder import Document
from ragorder.adapters.openai.call import Call, CallSetup, OrderedStream, generate_async
from ragorder.adapters.openai.endpoint import checked_options
from ragorder.adapters.openai.prompts import predict_lengths
from ragorder.adapters.openai.reply import Answer
from ragorder.common.lock import is_collecting
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths

BatchRequest = tuple[str, Sequence[Document]] | tuple[str, Sequence[Document], Hashable]
"""A query, its documents in retrieval order, and its scope."""

BatchOutcome = tuple[int, Answer | Exception]

# Number of waiting requests that an ordering considers.
_UPCOMING = 8


class _QueuedRequest(NamedTuple):
    number: int
    query: str
    documents: Sequence[Document]
    scope: Hashable


class BatchBacklog:
    """A batch's unsent requests. Thread-safe. Raises TypeError, ValueError."""

    def __init__(
        self,
        setup: CallSetup,
        requests: Iterable[BatchRequest],
        options: dict[str, Any],
        concurrency: int,
        window: int,
        on_error: Literal["return", "raise"],
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: give at least 1")
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error is {on_error!r}: give 'return' or 'raise'")
        checked_options(options, None, send_salt=False)
        self.raises = on_error == "raise"
        self._setup = setup
        self._options = options
        self._lock = threading.Lock()
        self._queue: CacheAwareQueue[_QueuedRequest] = CacheAwareQueue(window)
        for index, request in enumerate(requests):
            waiting = _read(index, request)
            self._queue.enter(waiting, self._lengths(waiting))
        self.size = len(self._queue)
        self.workers = min(concurrency, self.size)

    def take(self) -> tuple[int, Call | Exception] | None:
        """Return the next index and its call, to be sent at once, or its error; None at the end."""
        with self._lock:
            if not self._queue:
                return None
            taken = self._queue.take().item
            upcoming = self._queue.upcoming(_UPCOMING)
        # Tenants must not influence each other.
        waiting = [each.documents for each in upcoming if each.scope == taken.scope]
        try:
            question = taken.query, taken.documents, taken.scope
            return taken.number, Call(self._setup, *question, waiting, self._options, hands_out=False)
        except (TypeError, ValueError) as error:
            return taken.number, error

    def _lengths(self, waiting: _QueuedRequest) -> Callable[[], CachedLengths]:
        _, query, documents, scope = waiting
        question_tokens = cache(self._setup.builder.suffix_tokens)
        return lambda: predict_lengths(self._setup.orderer, documents, scope, question_tokens(query))


def answer_many(backlog: BatchBacklog) -> Generator[BatchOutcome, None, None]:
    """Send each request in flight from a thread. Closing ends a request at its next piece."""
    ready: SimpleQueue[tuple[int, Answer | BaseException]] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set() and (taken := backlog.take()) is not None:
            index, call = taken
            outcome: Answer | BaseException | None
            try:
                outcome = call if isinstance(call, Exception) else _answer(call, stopped)
            except BaseException as error:
                outcome = error
            if outcome is not None:
                ready.put((index, outcome))

    threads = [threading.Thread(target=work, name="ragorder-batch", daemon=True) for _ in range(backlog.workers)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(backlog.size):
            index, outcome = ready.get()
            yield index, _checked(outcome, backlog)
    finally:
        stopped.set()
        for thread in threads:
            # A dropped iterator does not wait: the collector may have interrupted an order that these threads need.
            if thread.ident is not None and not is_collecting():
                thread.join()


async def answer_many_async(backlog: BatchBacklog) -> AsyncGenerator[BatchOutcome, None]:
    """Send each request in flight from a task. Closing cancels them."""
    ready: asyncio.Queue[tuple[int, Answer | BaseException]] = asyncio.Queue()

    async def work() -> None:
        while (taken := backlog.take()) is not None:
            index, call = taken
            try:
                outcome = call if isinstance(call, Exception) else await generate_async(call)
            except Exception as error:
                outcome = error
            except BaseException as error:
                # Otherwise the consumer would wait forever.
                ready.put_nowait((index, error))
                raise
            ready.put_nowait((index, outcome))

    tasks = [asyncio.create_task(work()) for _ in range(backlog.workers)]
    try:
        for _ in range(backlog.size):
            index, outcome = await ready.get()
            yield index, _checked(outcome, backlog)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read(index: int, request: BatchRequest) -> _QueuedRequest:
    if not isinstance(request, tuple | list) or len(request) not in (2, 3) or not isinstance(request[0], str):
        raise ValueError(f"request {index} has the wrong form: give (query, documents) or (query, documents, scope)")
    return _QueuedRequest(index, request[0], list(request[1]), request[2] if len(request) == 3 else None)


def _answer(call: Call, stopped: threading.Event) -> Answer | None:
    with OrderedStream(call) as stream:
        for _ in stream:
            if stopped.is_set():
                break
    return stream.answer


def _checked(outcome: Answer | BaseException, backlog: BatchBacklog) -> Answer | Exception:
    if isinstance(outcome, Answer):
        return outcome
    if backlog.raises or not isinstance(outcome, Exception):
        raise outcome
    return outcome
