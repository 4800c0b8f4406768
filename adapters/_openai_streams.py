"""The two streams that a caller takes the pieces of an answer from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Self

from ragorder import Document, Ordering
from ragorder.adapters._openai_call import Call
from ragorder.adapters._openai_reply import Answer

__all__ = ["AsyncOrderedStream", "OrderedStream"]


class _Stream:
    def __init__(self, call: Call) -> None:
        self._call = call

    @property
    def ordering(self) -> Ordering[Document] | None:
        """The ordering of the request that was sent (None: not sent yet)."""
        return self._call.ordering

    @property
    def answer(self) -> Answer | None:
        """The whole answer, once the last piece was taken."""
        return self._call.answer


class OrderedStream(_Stream):
    """The pieces of an answer, as they arrive. Closing it early ends the request; it closes itself when dropped."""

    def __init__(self, call: Call, pieces: Generator[str, None, None]) -> None:
        super().__init__(call)
        self._pieces = pieces
        next(pieces)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        return next(filter(None, self._pieces))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the HTTP stream and settle the ordering."""
        self._pieces.close()


class AsyncOrderedStream(_Stream):
    """`OrderedStream` for a coroutine. Use it by `async with`, or close it: once dropped, it closes itself late."""

    def __init__(self, call: Call, pieces: AsyncGenerator[str, None]) -> None:
        super().__init__(call)
        self._pieces = pieces

    def __aiter__(self) -> Self:
        return self

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
        """Close the HTTP stream and settle the ordering."""
        await self._pieces.aclose()
