"""Re-entrant lock that a waiting thread gets before its last owner."""

from __future__ import annotations

from threading import Lock, get_ident


class FairLock:
    """An RLock would always go to the thread that computes one step after the other."""

    def __init__(self) -> None:
        self._held = Lock()
        # Who has this waits for the lock, and is the next.
        self._next = Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if self._owner != get_ident():
            with self._next:
                self._held.acquire()
            self._owner = get_ident()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._held.release()
