"""Lock of an orderer, with a queue of deferred work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock
from typing import Any, TypeVar, TypeVarTuple

from ragorder import _deferred

__all__ = ["DeferringLock", "ReentryError"]

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class ReentryError(RuntimeError):
    """An orderer was used from within itself: the `__eq__` or `__hash__` of a key or of a scope calls it."""


class DeferringLock:
    """Runs one piece of work at a time.

    Deferred work never waits for the lock: a finaliser may defer it in the middle of an order, in the thread that
    holds the lock. It runs at once if the lock is free, else when the lock is released, and always before other work.
    """

    def __init__(self, report: Callable[[Exception], None]) -> None:
        # An RLock only because it can tell whether this thread owns it: it is never acquired twice.
        self._lock: Any = RLock()
        self._report = report
        self._queue: deque[Callable[[], None]] = deque()
        self._errors: deque[Exception] = deque()

    def run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Run the deferred work, then `work`, and return its result. Raises ReentryError within other work."""
        if self._lock._is_owned():
            raise ReentryError("the orderer is already in use further up this call stack")
        if _deferred.deferred:
            _deferred.run_deferred()
        try:
            with self._lock:
                if self._queue:
                    self._run_queue()
                return work(*arguments)
        finally:
            # Deferred meanwhile, when the lock was not free.
            if self._queue or self._errors:
                self.drain()

    def defer(self, work: Callable[[], None]) -> None:
        """Run `work` before any other work. Never waits."""
        self._queue.append(work)
        self.drain()

    def drain(self) -> None:
        """Run the deferred work, unless the lock is held: then its holder runs it."""
        lock = self._lock
        while self._queue and not lock._is_owned():
            try:
                try:
                    if not lock.acquire(blocking=False):
                        return
                    self._run_queue()
                finally:
                    if lock._is_owned():
                        lock.release()
            finally:
                # Once more, in case an interrupt came in between.
                if lock._is_owned():
                    lock.release()
        while self._errors and not lock._is_owned():
            _deferred.run_or_defer(partial(self._report, self._errors.popleft()))

    def after_fork(self) -> bool:
        """In a child process: whether another thread of the parent held the lock, which it cannot release here."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return False
        self._lock = RLock()
        return True

    def _run_queue(self) -> None:
        queue = self._queue
        while queue:
            try:
                queue[0]()
            except Exception as error:
                self._errors.append(error)
            finally:
                queue.popleft()
