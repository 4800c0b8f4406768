"""The lock of an orderer, and the outcomes that wait for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, TypeVar, TypeVarTuple

from ragorder import _collector

__all__ = ["Gate", "ReentryError"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class ReentryError(RuntimeError):
    """An orderer was used from within itself: the `__eq__` or `__hash__` of a key or of a scope calls it."""


class Gate:
    """Runs one piece of work at a time.

    A outcome never waits for the lock: it may come from a finaliser, which the collector runs wherever memory is
    asked for, in the middle of an order as well, in the thread that holds the lock. It joins a queue. The queue is
    worked off at once where the lock is free, else when the lock is given back, and in any case before the next work.
    """

    def __init__(self, report: Callable[[Exception], None]) -> None:
        # Re-entrant only because such a lock knows its thread: nothing is ever entered twice.
        self._lock: Any = RLock()
        self._report = report
        self._waiting: deque[Callable[[], None]] = deque()
        self._errors: deque[Exception] = deque()

    def run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """The result of the work, done alone and after all that waits. Raises ReentryError within other work."""
        if self._lock._is_owned():
            raise ReentryError("the orderer is in use further up in this very call")
        if _collector.waiting:
            _collector.catch_up()
        try:
            with self._lock:
                if self._waiting:
                    self._work_off()
                return work(*arguments)
        finally:
            # Of a outcome that came meanwhile and did not get the lock.
            if self._waiting or self._errors:
                self.settle()

    def later(self, outcome: Callable[[], None]) -> None:
        """Have a outcome done before any other work. Never waits."""
        self._waiting.append(outcome)
        self.settle()

    def settle(self) -> None:
        """Work the queue off, unless somebody holds the lock, who then does it."""
        lock = self._lock
        while self._waiting and not lock._is_owned():
            try:
                try:
                    if not lock.acquire(blocking=False):
                        return
                    self._work_off()
                finally:
                    if lock._is_owned():
                        lock.release()
            finally:
                # Once more, should an interrupt have come between.
                if lock._is_owned():
                    lock.release()
        while self._errors and not lock._is_owned():
            _collector.when_collected(partial(self._report, self._errors.popleft()))

    def after_fork(self) -> bool:
        """In a child process: whether another thread of the parent held the lock, which it cannot give back here."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return False
        self._lock = RLock()
        return True

    def _work_off(self) -> None:
        waiting = self._waiting
        while waiting:
            try:
                waiting[0]()
            except Exception as error:
                self._errors.append(error)
            finally:
                waiting.popleft()
