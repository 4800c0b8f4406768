"""Engine with a bounded number of requests on it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Generic, TypeVar

from ragorder.pipelining.protocols import AnswerChunk, EngineRequest, StreamingEngine
from ragorder.pipelining.reordering import CacheAwareQueue, ConcurrencyLimiter

__all__ = ["BoundedEngine"]

R = TypeVar("R", bound=EngineRequest)


class BoundedEngine(Generic[R]):
    """At most `limit` requests are on the engine, those that it aborts until they have ended; another waits that long.
    Raises ValueError for a limit below 1."""

    def __init__(self, engine: StreamingEngine[R], limit: int) -> None:
        self._engine = engine
        self._places: ConcurrencyLimiter[None] = ConcurrencyLimiter(limit, CacheAwareQueue(window=0))

    async def stream(self, request: R, /) -> AsyncGenerator[AnswerChunk, None]:
        async with self._places.slot(None), aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk
