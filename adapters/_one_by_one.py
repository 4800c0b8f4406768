"""Calls from any thread, and from finalisers, run one at a time without ever waiting for a lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock

__all__ = ["OneByOne"]


class OneByOne:
    """Runs calls one at a time, in the order of their arrival. Never blocks.

    A call that arrives while another one runs is left to the thread that runs that one. A lock that waits would not
    do: the collector may run a finaliser (of a stream that was dropped, say) in the middle of a call, in the very
    thread that holds the lock.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], object]] = deque()
        self._running = Lock()

    def __call__(self, call: Callable[[], object]) -> None:
        """Run `call` now, or leave it to the thread that is at it. Raises what a call raised, once the others ran."""
        self._calls.append(call)
        failure: Exception | None = None
        # Looked at again after the release: what arrived meanwhile was left to this thread.
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
