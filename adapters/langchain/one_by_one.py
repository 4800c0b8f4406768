"""Serialised calls without waiting for a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock

__all__ = ["OneByOne"]


class OneByOne:
    """Runner of calls one at a time, in order of arrival; a call during another one runs in that one's thread. A lock
    would not do: a finaliser may run in the middle of a call, in the thread that holds it."""

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._running = Lock()

    def __call__(self, call: Callable[[], object]) -> None:
        """Run a call. Raises its own error, after the other calls."""
        self._calls.append(call)
        failure: Exception | None = None
        # Checked again after the release: calls that arrived meanwhile were left to this thread.
        while self._calls and self._running.acquire(blocking=False):
            try:
                while self._calls:
                    self._calls.popleft()()
            except Exception as error:
                failure = error
            finally:
                self._running.release()
        if failure is not None:
            raise failure
