"""Warm-up: the system prompt is prefilled while retrieval runs (RAGCache++ section 3.6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Hashable
from typing import Generic, Protocol, TypeVar

__all__ = ["Prefix", "WarmUp", "Warming"]

Q_contra = TypeVar("Q_contra", contravariant=True)
Q = TypeVar("Q")

_logger = logging.getLogger("ragorder")


class Prefix(Protocol[Q_contra]):
    """What stands in front of the documents, on an engine. `scope` names the cache that it lies in: questions of one
    scope (tenant, template) share it."""

    def scope(self, question: Q_contra, /) -> Hashable: ...

    def is_cached(self, question: Q_contra, /) -> bool:
        """Whether the engine is believed to hold it, or to be computing it, or could not keep a block of it."""

    def prefill(self, question: Q_contra, /) -> Awaitable[None]:
        """Have the engine compute it. Cancelling aborts the request."""


class Warming:
    """A warm-up on its way, with those who wait for their documents meanwhile."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self._users = 1

    def join(self) -> None:
        self._users += 1

    def leave(self) -> None:
        """A retrieval has ended. With the last one the warm-up is of no use any more: what comes next computes the
        system prompt itself, or finds as much of it as is there."""
        self._users -= 1
        if not self._users:
            self._task.cancel()


class WarmUp(Generic[Q]):
    """Prefills a system prompt that is not cached: at a cold start, after an eviction, after a restart of the engine.

    Never twice at once in a scope. Errors reach nobody: the request that follows meets them itself.
    """

    def __init__(self, prefix: Prefix[Q]) -> None:
        self.started = 0
        self._prefix = prefix
        self._warming: dict[Hashable, Warming] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, question: Q) -> Warming | None:
        """The warm-up that runs for this question (None: none is needed). Leave it when retrieval has ended."""
        try:
            scope = self._prefix.scope(question)
            warming = self._warming.get(scope)
            if warming is not None:
                warming.join()
                return warming
            if self._prefix.is_cached(question):
                return None
        except Exception as error:
            _logger.warning("no warm-up: %s", type(error).__name__)
            return None
        self.started += 1
        task = asyncio.create_task(self._prefill(question))
        warming = self._warming[scope] = Warming(task)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._forget(scope, done))
        return warming

    async def close(self) -> None:
        """End what is on its way, and wait until it has ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    async def _prefill(self, question: Q) -> None:
        try:
            await self._prefix.prefill(question)
        except Exception as error:
            _logger.debug("a warm-up failed: %s", type(error).__name__)

    def _forget(self, scope: Hashable, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        warming = self._warming.get(scope)
        if warming is not None and warming._task is task:
            del self._warming[scope]
