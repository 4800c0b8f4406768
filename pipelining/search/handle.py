"""Handle of a shared search."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ragorder.pipelining.staged import Stage

_logger = logging.getLogger("ragorder")


class SearchHandle:
    """A search among others. Thread-safe.

    `due`: not speculative; `whole`: not cut into pieces. A reader of stages gets the latest one, and always the last.
    """

    def __init__(self, drive: Callable[[], object] | None, *, due: bool = True, whole: bool = False) -> None:
        self.due = due
        self.whole = whole
        self.done = False
        self._drive = drive
        self._changed = threading.Condition()
        self._stage: Callable[[], Stage] | None = None
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return isinstance(self._error, CancelledError)

    @property
    def stage(self) -> Stage | None:
        stage = self._stage
        return None if stage is None else stage()

    def promote(self) -> None:
        self.due = True

    def cancel(self) -> bool:
        """End it after this piece. Return False if it was done."""
        return self.fail(CancelledError("the search was cancelled"))

    def stages(self) -> Iterator[Stage]:
        seen: object = None
        while True:
            with self._changed:
                while self._drive is None and not self.done and self._stage is seen:
                    self._changed.wait()
                news, final = self._news(seen)
            if news is not None:
                seen = news
                yield news()
                if final:
                    return
            elif self._drive is not None:
                self._drive()

    async def stages_async(self) -> AsyncGenerator[Stage, None]:
        loop, wake, seen = asyncio.get_running_loop(), asyncio.Event(), None

        def notify() -> None:
            # In a closed loop no caller waits.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(wake.set)

        self.subscribe(notify)
        while True:
            wake.clear()
            with self._changed:
                news, final = self._news(seen)
            if news is not None:
                seen = news
                yield news()
                if final:
                    return
            elif self._drive is not None:
                await asyncio.to_thread(self._drive)
            else:
                await wake.wait()

    def result(self, timeout_s: float | None = None) -> Stage:
        if self._drive is None:
            with self._changed:
                if not self._changed.wait_for(lambda: self.done, timeout_s):
                    raise TimeoutError(f"the search has not ended within {timeout_s} s")
        *_, stage = self.stages()
        return stage

    def subscribe(self, notify: Callable[[], None]) -> None:
        """Call `notify` at each change, in the driver's thread, and now if there was one already."""
        with self._changed:
            self._listeners.append(notify)
            if self.done or self._stage is not None:
                notify()

    def publish(self, stage: Callable[[], Stage], *, final: bool) -> None:
        with self._changed:
            if not self.done:
                self._stage, self.done = stage, final
                self._notify()

    def fail(self, error: BaseException) -> bool:
        with self._changed:
            if self.done:
                return False
            self._error, self.done = error, True
            self._notify()
            return True

    def _news(self, seen: object) -> tuple[Callable[[], Stage] | None, bool]:
        if self._error is not None:
            raise self._error
        return (None if self._stage is seen else self._stage), self.done

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            try:
                listener()
            except Exception as error:
                # This is the driver's thread, which also serves other callers.
                _logger.warning("a listener to a search failed: %s", type(error).__name__)
