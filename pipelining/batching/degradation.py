"""Reactions to failures."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ragorder.pipelining.batching.requests import BatchedRequest
from ragorder.pipelining.servers import FirstFailures, in_thread

# Memory is freed at most this often for one request.
_MOST_RELIEFS = 64
# Errors of torch and of this project by name, to import neither; on a CPU torch raises plain RuntimeErrors.
_SHORTAGES = {"OutOfMemoryError", "OutOfBlocksError"}
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|ALLOC_FAILED")
# HTTP: too many requests, service unavailable.
_OVERLOAD = {429, 503}


class Relief(Protocol):
    def relieve(self) -> bool:
        """Free memory at the cost of speed, from another thread. Return False if there is none to free."""


def is_shortage(error: BaseException) -> bool:
    """Return whether fewer requests or a retry may avoid this error: memory, I/O, an overloaded server."""
    return any(
        isinstance(each, OSError) or is_out_of_memory(each) or getattr(each, "status_code", None) in _OVERLOAD
        for each in _causes(error)
    )


def is_out_of_memory(error: BaseException) -> bool:
    return any(
        isinstance(each, MemoryError)
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or any(base.__name__ in _SHORTAGES for base in type(each).__mro__)
        or (type(each) is RuntimeError and _NO_MEMORY.search(str(each)) is not None)
        for each in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    seen: list[BaseException] = []
    # `raise error from error` makes a circle.
    while cause is not None and not any(cause is each for each in seen):
        yield cause
        seen.append(cause)
        cause = cause.__cause__


class Degradation:
    """One worker's reactions to failures.

    A request runs again in a batch of half the size, down to 1; then, if out of memory, after one of `reliefs`; then
    `max_retries` times. `limit` bounds all batches meanwhile.
    """

    def __init__(self, reliefs: Sequence[Relief], max_retries: int, on_relief: Callable[[], None]) -> None:
        if max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {max_retries}")
        self.limit: int | None = None
        self._reliefs = tuple(reliefs)
        self._max_retries = max_retries
        self._on_relief = on_relief
        self._answered = 0
        self._warn = FirstFailures()
        self._relieving = asyncio.Lock()

    def bound(self, size: int) -> int:
        return size if self.limit is None else max(1, min(size, self.limit))

    def succeeded(self, size: int) -> None:
        if self.limit is None or size < self.limit:
            return
        self._answered += 1
        if self._answered >= self.limit:
            self.limit, self._answered = self.limit + 1, 0

    async def retries(
        self, request: BatchedRequest[Any, Any], size: int, error: Exception, *, shared: bool, progress: bool = False
    ) -> bool:
        """Return whether a request runs again. `shared`: another one may have caused the error."""
        if request.abandoned or request.ended.done():
            return False
        shortage = is_shortage(error)
        if not shortage and not shared:
            return False
        request.trace.failures += 1
        if shortage:
            self._shrink(size)
        if size > 1:
            request.most = max(1, min(request.most, size) // 2)
            return True
        if not shortage:
            return False
        if progress:
            request.alone = 0
        if is_out_of_memory(error) and request.reliefs < _MOST_RELIEFS and await self._relieve():
            request.reliefs += 1
            return True
        request.alone += 1
        return request.alone <= self._max_retries

    def _shrink(self, size: int) -> None:
        limit = max(1, size // 2)
        self.limit = limit if self.limit is None else min(self.limit, limit)
        self._answered = 0

    async def _relieve(self) -> bool:
        async with self._relieving:
            for relief in self._reliefs:
                try:
                    helped = await in_thread(relief.relieve)
                except Exception as error:
                    self._warn("relieving memory", error)
                    continue
                if helped:
                    self._on_relief()
                    return True
        return False
