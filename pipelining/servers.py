"""Common parts of servers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, Generic, Self, TypeVar

A = TypeVar("A")
P = TypeVar("P")
Q = TypeVar("Q")
T = TypeVar("T")

_logger = logging.getLogger("ragorder")


class AnswerStream(AsyncIterator[str], ABC, Generic[P]):
    """Text of an answer as it is generated. Closing it ends the request."""

    def __init__(self, parts: AsyncGenerator[P, None]) -> None:
        self._parts = parts
        self._texts: list[str] = []
        self._reading = asyncio.Lock()

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @abstractmethod
    def _read(self, part: P) -> str: ...

    async def __anext__(self) -> str:
        async with self._reading:
            async for part in self._parts:
                if text := self._read(part):
                    self._texts.append(text)
                    return text
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Wait for another task that reads, also one that is being cancelled."""
        async with self._reading:
            await self._parts.aclose()


async def run_batch(
    questions: Iterable[Q],
    run: Callable[[Q], Coroutine[Any, Any, A]],
    *,
    at_once: int,
    on_progress: Callable[[int], object] | None = None,
) -> AsyncGenerator[tuple[int, A | Exception], None]:
    """Yield (number of the question, answer or error) as requests end."""
    numbered = enumerate(questions)
    tasks: dict[asyncio.Task[A], int] = {}
    ended = 0
    try:
        while True:
            while len(tasks) < at_once and (following := next(numbered, None)) is not None:
                tasks[asyncio.create_task(run(following[1]))] = following[0]
            if not tasks:
                return
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=tasks.__getitem__):
                number = tasks.pop(task)
                ended += 1
                if on_progress is not None:
                    on_progress(ended)
                yield number, outcome_of(task, "request")
    finally:
        await end_all(tasks)


def outcome_of(task: asyncio.Task[T], name: str) -> T | Exception:
    if task.cancelled():
        return RuntimeError(f"the {name} was cancelled")
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception):
        raise error
    return error


async def call(function: Callable[..., Any], *args: Any) -> Any:
    """Call a coroutine function on the event loop, another one in a thread."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None)):  # noqa: B004
        return await function(*args)
    result = await in_thread(function, *args)
    return await result if inspect.isawaitable(result) else result


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a user's function in a thread. StopIteration becomes RuntimeError, as in a coroutine."""

    def called() -> T:
        try:
            return function(*args)
        except StopIteration as error:
            # Before Python 3.11.8 whoever waits for it would wait for ever.
            raise RuntimeError("a function raised StopIteration") from error

    return await asyncio.to_thread(called)


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await wait_for_end(lambda: tasks)


async def wait_for_end(tasks: Callable[[], Collection[asyncio.Task[Any]]]) -> None:
    """Wait until all `tasks()`, also later ones, have ended; raise CancelledError only then."""
    cancelled: asyncio.CancelledError | None = None
    while left := [task for task in tasks() if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class FirstFailures:
    """Logs the first failure of each part that must not end the work."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def __call__(self, name: str, error: Exception) -> None:
        if name not in self._logged:
            self._logged.add(name)
            _logger.warning("%s failed: %s; later failures are not logged", name, type(error).__name__)

    def guard(self, name: str, function: Callable[..., T], *args: Any) -> T | None:
        """Return None if the function fails."""
        try:
            return function(*args)
        except Exception as error:
            self(name, error)
            return None


def observer_of(observers: Sequence[Callable[[T], object]], what: str) -> Callable[[T], None]:
    """Return one observer for all; one that fails is logged and left out."""
    left = list(observers)

    def observe(observed: T) -> None:
        for observer in tuple(left):
            try:
                observer(observed)
            except Exception as error:
                left.remove(observer)
                _logger.warning("an observer of %s failed with %s and is left out", what, type(error).__name__)

    return observe
