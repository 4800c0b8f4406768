"""Event loop on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

from ragorder.errors import RagorderError

T = TypeVar("T")


class DeadlockError(RagorderError, RuntimeError):
    """Every task waits, and no timer is set."""


class _Timers:
    """In place of a selector: a wait for the next timer moves the clock, and takes no time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise DeadlockError("every task waits, and no timer is set: await something that takes virtual time")
        self.now_s += max(0.0, timeout_s)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs tasks as any loop does. `time()` begins at 0, and passes only while all tasks wait. A function handed to a
    thread runs at once and takes no time: charge what it stands for with `asyncio.sleep`. There are no sockets,
    processes and signals. Clocks of the code under test must be the loop's own."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = _Timers()

    def time(self) -> float:
        return self._selector.now_s

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine in a loop of its own. Raises DeadlockError, and what `main` raises."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
