"""Answer of a request as it is generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Generic, Self, TypeVar

from ragorder.pipelining.batching.requests import BatchedAnswer

__all__ = ["BatchedStream"]

D = TypeVar("D")


class BatchedStream(AsyncIterator[str], Generic[D]):
    """The pieces of an answer. Closing it early, or leaving `async with`, ends its request. `answer` is there once the
    stream has ended."""

    def __init__(self, pieces: AsyncGenerator[str | BatchedAnswer[D], None]) -> None:
        self.answer: BatchedAnswer[D] | None = None
        self._pieces = pieces

    async def __anext__(self) -> str:
        async for piece in self._pieces:
            if isinstance(piece, str):
                return piece
            self.answer = piece
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pieces.aclose()
