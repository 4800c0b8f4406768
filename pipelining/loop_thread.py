"""An event loop on its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for callers of any thread. Raises RuntimeError once closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()
        self._closed = False
        self._submitting = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError(f"{self._name} would wait for itself: call it from another thread, or use arun")
        running = self._submit(work)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self._submit(work))

    def close(self, end: Callable[[], Awaitable[None]] | None = None) -> None:
        with self._submitting:
            if self._closed:
                return
            self._closed = True
            # Work that was submitted before is a task when the end lists them.
            ending = asyncio.run_coroutine_threadsafe(self._end(end), self._loop)
        try:
            ending.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._submitting:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError(f"{self._name} is closed")

    async def _end(self, end: Callable[[], Awaitable[None]] | None) -> None:
        try:
            if end is not None:
                await end()
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_asyncgens()
            await self._loop.shutdown_default_executor()
