"""Generations ahead of need, on provisional documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ragorder.pipelining.attempt import Attempt
from ragorder.pipelining.load import EngineLoad
from ragorder.pipelining.protocols import EngineRequest, PipelineTrace
from ragorder.pipelining.workflow.nodes import NodeQuestion
from ragorder.pipelining.workflow.trace import Outcome
from ragorder.pipelining.workflow.wavefront import Piece

__all__ = ["GenerationAhead"]

D = TypeVar("D")
R = TypeVar("R", bound=EngineRequest)


class GenerationAhead(Generic[D, R]):
    """Speculations on one run of a generation, one at a time. `begun` and `ended` are called for their pieces, and
    `off_engine` once the engine is done with one that is still of use."""

    def __init__(
        self,
        attempt: Attempt[NodeQuestion, D, R],
        trace: PipelineTrace,
        begun: Callable[[Piece], None],
        ended: Callable[[Piece, Outcome], None],
        off_engine: Callable[[Piece], None],
    ) -> None:
        self.attempt = attempt
        self._trace = trace
        self._begun = begun
        self._ended = ended
        self._off_engine = off_engine
        self._piece: Piece | None = None
        self._next: Piece | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def right(self) -> bool:
        """The answer is that of a speculation."""
        return self._trace.right

    @property
    def idle(self) -> bool:
        """There has been none."""
        return self._task is None

    @property
    def beginning(self) -> bool:
        """A speculation waits for the abort of the last one."""
        return self._next is not None

    def has_place(self, question: NodeQuestion, documents: Sequence[D]) -> bool:
        """A speculation is on the engine, or has been answered and is right."""
        piece = self._piece
        return piece is not None and (not piece.released or self.attempt.foresaw(question, documents))

    def begin(self, piece: Piece, question: NodeQuestion, documents: Sequence[D], load: EngineLoad) -> None:
        self._next = piece
        self._task = asyncio.create_task(self._begin(piece, question, documents, load))

    def due(self) -> None:
        """The generation is due: a speculation that runs stays, none begins."""
        if self._next is not None:
            self._ended(self._next, "cancelled")
            self._next = None
        if self._task is not None:
            self._task.cancel()

    def used(self, *, right: bool) -> None:
        self._replace(None, "used" if right else "rolled back")

    async def leave(self, outcome: Outcome) -> None:
        """Returns when the engine is done with it."""
        self.due()
        self._replace(None, outcome)
        await self.attempt.abort()

    async def _begin(self, piece: Piece, question: NodeQuestion, documents: Sequence[D], load: EngineLoad) -> None:
        began = self._trace.speculations
        kept = await self.attempt.speculate(
            question, documents, load, lambda: True, lambda: piece.admission, lambda: self._off_engine(piece)
        )
        self._next = None
        if self._trace.speculations > began:
            self._replace(piece, "rolled back")
            self._begun(piece)
        else:
            # The request is the last one's, or there is no room.
            self._ended(piece, "cancelled")
        if not kept:
            self._replace(None, "rolled back")
            if piece.after is not None:
                piece.after.speculated = None

    def _replace(self, piece: Piece | None, outcome: Outcome) -> None:
        if self._piece is not None:
            self._ended(self._piece, outcome)
        self._piece = piece
