"""Many questions to a server: they wait in a cache-aware queue, and answers come as they are ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Literal

from ragorder import Document
from ragorder._deferred import is_collecting
from ragorder.adapters.openai.call import Call, Setup
from ragorder.adapters.openai.reply import Answer
from ragorder.adapters.openai.request import checked_options
from ragorder.adapters.openai.stream import OrderedStream, generate_async
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths

__all__ = ["Backlog", "Outcome", "Question", "answer_many", "answer_many_async"]

Question = tuple[str, Sequence[Document]] | tuple[str, Sequence[Document], Hashable]
"""A query and its documents, in retrieval order; and its scope, where it has one."""

Outcome = tuple[int, Answer | Exception]
"""The place of a question among those that were given, and its answer, or why there is none."""

# So many of those that wait does the orderer lay out the cache for.
_FORESEEN = 8


@dataclass(frozen=True, slots=True)
class _Waiting:
    index: int
    query: str
    documents: Sequence[Document]
    scope: Hashable


class Backlog:
    """The questions that nobody has asked yet. Thread-safe.

    Raises TypeError or ValueError for questions, options or numbers that cannot be.
    """

    def __init__(
        self,
        setup: Setup,
        questions: Iterable[Question],
        options: dict[str, Any],
        *,
        concurrency: int,
        window: int,
        on_error: Literal["return", "raise"],
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {concurrency}")
        if on_error not in ("return", "raise"):
            raise ValueError(f"on_error must be 'return' or 'raise', got {on_error!r}")
        checked_options(options, None, send_salt=False)
        self.raises = on_error == "raise"
        self._setup = setup
        self._options = options
        self._lock = threading.Lock()
        self._queue: CacheAwareQueue[_Waiting] = CacheAwareQueue(window)
        for index, question in enumerate(questions):
            waiting = _read(index, question)
            self._queue.enter(waiting, self._lengths(waiting))
        self.questions = len(self._queue)
        self.workers = min(concurrency, self.questions)

    def take(self) -> tuple[int, Call | Exception] | None:
        """The question to be asked next, or why it cannot be; None: there are no more. To be sent at once."""
        with self._lock:
            if not self._queue:
                return None
            taken = self._queue.take().item
            foreseen = self._queue.upcoming(_FORESEEN)
        # What one tenant waits for is no business of another's.
        waiting = [each.documents for each in foreseen if each.scope == taken.scope]
        try:
            question = taken.query, taken.documents, taken.scope
            return taken.index, Call(self._setup, *question, waiting, self._options, hands_out=False)
        except (TypeError, ValueError) as error:
            return taken.index, error

    def _lengths(self, waiting: _Waiting) -> Callable[[], CachedLengths]:
        setup = self._setup
        question_tokens: int | None = None

        def lengths() -> CachedLengths:
            nonlocal question_tokens
            if question_tokens is None:
                question_tokens = setup.builder.suffix_tokens(waiting.query)
            cached_tokens, documents_end = setup.orderer.predict_cached_tokens(waiting.documents, scope=waiting.scope)
            return CachedLengths(cached_tokens, documents_end + question_tokens - cached_tokens)

        return lengths


def answer_many(backlog: Backlog) -> Generator[Outcome, None, None]:
    """The outcomes as they are ready, with a thread for each request in flight. Closing it waits for the next pieces
    that these get, and ends them there."""
    ready: SimpleQueue[tuple[int, Answer | BaseException]] = SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        while not stopped.is_set() and (taken := backlog.take()) is not None:
            index, call = taken
            outcome: Answer | BaseException | None
            try:
                outcome = call if isinstance(call, Exception) else _ask(call, stopped)
            except BaseException as error:
                outcome = error
            if outcome is not None:
                ready.put((index, outcome))

    threads = [threading.Thread(target=work, name="ragorder-batch", daemon=True) for _ in range(backlog.workers)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(backlog.questions):
            index, outcome = ready.get()
            yield index, _checked(outcome, backlog)
    finally:
        stopped.set()
        for thread in threads:
            # Dropped, it does not wait: the collector may have interrupted an order that these threads wait for.
            if thread.ident is not None and not is_collecting():
                thread.join()


async def answer_many_async(backlog: Backlog) -> AsyncGenerator[Outcome, None]:
    """The outcomes as they are ready, with a task for each request in flight. Closing it ends these."""
    ready: asyncio.Queue[tuple[int, Answer | BaseException]] = asyncio.Queue()

    async def work() -> None:
        while (taken := backlog.take()) is not None:
            index, call = taken
            try:
                outcome = call if isinstance(call, Exception) else await generate_async(call)
            except Exception as error:
                outcome = error
            except BaseException as error:
                # Whoever waits for it is to know that it will not come.
                ready.put_nowait((index, error))
                raise
            ready.put_nowait((index, outcome))

    tasks = [asyncio.create_task(work()) for _ in range(backlog.workers)]
    try:
        for _ in range(backlog.questions):
            index, outcome = await ready.get()
            yield index, _checked(outcome, backlog)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read(index: int, question: Question) -> _Waiting:
    if not isinstance(question, tuple | list) or len(question) not in (2, 3) or not isinstance(question[0], str):
        raise ValueError(f"request {index} must be (query, documents) or (query, documents, scope)")
    return _Waiting(index, question[0], list(question[1]), question[2] if len(question) == 3 else None)


def _ask(call: Call, stopped: threading.Event) -> Answer | None:
    """The answer; None if it is stopped before that."""
    with OrderedStream(call) as stream:
        for _ in stream:
            if stopped.is_set():
                break
    return stream.answer


def _checked(outcome: Answer | BaseException, backlog: Backlog) -> Answer | Exception:
    if isinstance(outcome, Answer):
        return outcome
    if backlog.raises or not isinstance(outcome, Exception):
        raise outcome
    return outcome
