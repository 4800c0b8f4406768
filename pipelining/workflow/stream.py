"""The answer of a workflow as it arrives."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Self

from ragorder.pipelining.workflow.result import WorkflowResult
from ragorder.pipelining.workflow.trace import WorkflowTrace

__all__ = ["AnswerText", "WorkflowStream"]


class WorkflowStream(AsyncIterator[str]):
    """The pieces of an answer. Closing it early, or leaving `async with`, ends everything that runs for it.

    `text` is what has arrived so far; `result` is there at the end.
    """

    def __init__(self, pieces: AsyncGenerator[str | WorkflowResult, None], trace: WorkflowTrace) -> None:
        self.trace = trace
        self.result: WorkflowResult | None = None
        self._pieces = pieces
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    async def __anext__(self) -> str:
        async for piece in self._pieces:
            if isinstance(piece, WorkflowResult):
                self.result = piece
            else:
                self._text.append(piece)
                return piece
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._pieces.aclose()


class AnswerText:
    """Chunks of a text without the white space around it."""

    def __init__(self) -> None:
        self.began = False
        self._space = ""

    def add(self, chunk: str) -> str:
        """What is certain to be in the text."""
        text = self._space + chunk if self.began else chunk.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self.began = self.began or bool(shown)
        return shown
