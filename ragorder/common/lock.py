"""Work deferred during garbage collection or while a lock is held.

The collector runs finalisers at any allocation, in a thread that may hold any lock, so their work that takes a lock
waits for the next call of this package.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import RLock, local
from typing import Any, Protocol, TypeVar, TypeVarTuple
from weakref import WeakSet

from ragorder.errors import RagorderError

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_logger = logging.getLogger("ragorder")

deferred: deque[Callable[[], object]] = deque()

# `_latest.args` is the collector's last phase with its information, one tuple that is replaced as a whole, because a
# collection of another thread can start between any two steps of this one. `_own` has the collection that this thread
# started: a finaliser that waits lets other threads run, which collect nothing. All callbacks are C functions: an
# interrupt (Ctrl-C) during a collection would be raised in the first line of a Python callback, and the collector would
# swallow it. `BaseException.__init__` is such a C function and stores its arguments.
_latest: Any = BaseException("stop", None)
_own: Any = local()
gc.callbacks += [_latest.__init__, _own.__setattr__]
if hasattr(os, "register_at_fork"):
    # A child must not run the parent's deferred work: closing a connection would break it in the parent.
    os.register_at_fork(after_in_child=deferred.clear)


def is_collecting() -> bool:
    phase, collection = _latest.args
    return phase == "start" and getattr(_own, "start", None) is collection


def run_or_defer(work: Callable[[], object]) -> None:
    if is_collecting():
        deferred.append(work)
    else:
        work()


def defer(work: Callable[[], object]) -> None:
    deferred.append(work)


def run_deferred() -> None:
    while deferred and not is_collecting():
        try:
            work = deferred.popleft()
        except IndexError:
            return
        try:
            work()
        except Exception as error:
            _logger.warning("deferred work of a dropped request failed with %s", type(error).__name__)


class ReentryError(RagorderError, RuntimeError):
    """An orderer is called within its own call, by `__eq__` or `__hash__` of a key or scope."""


class DeferringLock:
    """Runs one piece of work at a time.

    Deferred work never waits for the lock, which its thread may hold: it runs at once if the lock is free, else on
    release, before other work.
    """

    def __init__(self, report: Callable[[Exception], None]) -> None:
        # An RLock only because it knows whether this thread owns it: it is never acquired twice.
        self._lock: Any = RLock()
        self._report = report
        self._queue: deque[Callable[[], None]] = deque()
        self._errors: deque[Exception] = deque()

    def run(self, work: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        # No context manager: an interrupt as its `__exit__` begins would leave the lock held for ever.
        if self._lock._is_owned():
            raise ReentryError("the orderer is already in use further up this call stack")
        if deferred:
            run_deferred()
        try:
            with self._lock:
                if self._queue:
                    self._run_queue()
                return work(*arguments)
        finally:
            # Run work that was deferred while the lock was held.
            if self._queue or self._errors:
                self.drain()

    def defer(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        self.drain()

    def drain(self) -> None:
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
                # Release again if an interrupt prevented the first release.
                if lock._is_owned():
                    lock.release()
        while self._errors and not lock._is_owned():
            run_or_defer(partial(self._report, self._errors.popleft()))

    def after_fork(self) -> bool:
        """Replace the lock and return True if another thread of the parent held it."""
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


class Forked(Protocol):
    def after_fork(self) -> None:
        """Renew the state in a child process, which lacks the parent's other threads."""


_followed: WeakSet[Forked] = WeakSet()


def follow(each: Forked) -> None:
    _followed.add(each)


def _renew() -> None:
    for each in list(_followed):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
