"""Threads for work on bodies, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")

# Up to this many bytes, work on the event loop takes less time than a thread switch.
_SHORT = 1 << 14
# From this many bytes on a body may take so long that ordinary ones must not wait for it.
_LONG = 1 << 18
_THREADS = 2


class Workers:
    """Runs work on short bodies at once (unless `always`), on ordinary ones in two threads, on long ones in a third, so
    that their copies need memory once."""

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._ordinary = _Threads(_THREADS)
        self._long = _Threads(1)

    async def run(self, work: Callable[[], T], length: int, *, abandoned: Callable[[T], object] | None = None) -> T:
        """`length` is the body's in bytes. If the wait is cancelled, `abandoned` gets any result, in any thread."""
        if length <= _SHORT and not self._always:
            return work()
        future = (self._long if length > _LONG else self._ordinary).submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if abandoned is not None:
                future.add_done_callback(partial(_abandon, abandoned))
            raise
        finally:
            del future, work

    def close(self) -> None:
        self._ordinary.close()
        self._long.close()


class _Threads:
    """Daemon threads: a ThreadPoolExecutor's would be joined at exit."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._started = 0
        self._lock = Lock()
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._tasks.put((future, work))
        with self._lock:
            if self._started < self._count:
                self._started += 1
                Thread(target=self._run, name="ragorder-bodies", daemon=True).start()
        return future

    def close(self) -> None:
        with self._lock:
            for _ in range(self._started):
                self._tasks.put(None)
            self._started = 0

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            _do(*task)
            # Otherwise the body would be kept until the next one comes.
            del task


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # The error's frame references the future, and so would keep the error and the body.
        del future, work
    else:
        future.set_result(result)


def _abandon(abandoned: Callable[[T], object], future: Future[T]) -> None:
    if not future.cancelled() and future.exception() is None:
        abandoned(future.result())
