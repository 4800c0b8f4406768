"""Drivers of a call for threads and coroutines, and their streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self, cast

from ragorder import Document, Ordering
from ragorder.adapters.openai.call import Call
from ragorder.adapters.openai.reply import Answer
from ragorder.common.lock import run_or_defer

__all__ = ["AsyncOrderedStream", "OrderedStream", "generate", "generate_async"]


@contextmanager
def _opened(stream: Any) -> Iterator[Any]:
    # Closing takes the lock of a connection pool, which a thread interrupted by the garbage collector may hold: a
    # dropped stream is closed after the collection.
    with ExitStack() as stack:
        opened = stack.enter_context(stream)
        try:
            yield opened
        finally:
            run_or_defer(stack.pop_all().close)


def _pieces(call: Call) -> Generator[str, None, None]:
    """Yield the answer's pieces, some empty; the first one when the server has accepted the request."""
    while call.answer is None:
        if call.delay_s:
            (call.setup.sleep or time.sleep)(call.delay_s)
        with call.attempt() as reply, _opened(call.create(reply)) as stream:
            reply.watch(stream)
            yield ""
            for chunk in stream:
                yield reply.read(chunk)


async def _async_pieces(call: Call) -> AsyncGenerator[str, None]:
    while call.answer is None:
        if call.delay_s:
            await (call.setup.sleep or asyncio.sleep)(call.delay_s)
        with call.attempt() as reply:
            async with await call.create(reply) as stream:
                reply.watch(stream)
                yield ""
                async for chunk in stream:
                    yield reply.read(chunk)


def generate(call: Call) -> Answer:
    for _ in _pieces(call):
        pass
    return cast(Answer, call.answer)


async def generate_async(call: Call) -> Answer:
    async for _ in _async_pieces(call):
        pass
    return cast(Answer, call.answer)


class _BaseStream:
    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def ordering(self) -> Ordering[Document] | None:
        """None before the request is sent."""
        return self._call.ordering

    @property
    def answer(self) -> Answer | None:
        """None before the last piece."""
        return self._call.answer


class OrderedStream(_BaseStream, Iterator[str]):
    """Stream of an answer's pieces. Closing it early, or dropping it, ends the request."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._pieces = _pieces(call)
        next(self._pieces)

    def __next__(self) -> str:
        return next(filter(None, self._pieces))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pieces.close()


class AsyncOrderedStream(_BaseStream, AsyncIterator[str]):
    """`OrderedStream` for coroutines. Use `async with`, or close it: a dropped one ends late."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self._pieces = _async_pieces(call)

    async def __anext__(self) -> str:
        async for piece in self._pieces:
            if piece:
                return piece
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        if self.ordering is None:
            await anext(self._pieces, "")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pieces.aclose()
