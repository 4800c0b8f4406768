"""Warm-up of the system prompt (RAGCache++ 3.6)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Hashable
from typing import Generic, Protocol

from ragorder.pipelining.protocols import Q, Q_contra
from ragorder.pipelining.servers import end_all

_logger = logging.getLogger("ragorder")


class Prefix(Protocol[Q_contra]):
    """The tokens before the documents, which questions of a `scope` share."""

    def scope(self, question: Q_contra, /) -> Hashable: ...

    def is_cached(self, question: Q_contra, /) -> bool:
        """Return whether it is cached, in computation, or too short for a block."""

    def prefill(self, question: Q_contra, /) -> Awaitable[None]:
        """Cancelling aborts the request."""


class Warming:
    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self._users = 1

    def join(self) -> bool:
        """Return False if it is being cancelled."""
        if self._task.cancelling():
            return False
        self._users += 1
        return True

    def leave(self) -> None:
        """End a retrieval; the last one cancels the warm-up."""
        self._users -= 1
        if not self._users:
            self._task.cancel()


class WarmUp(Generic[Q]):
    """Prefills an uncached system prompt, once at a time per scope.

        pipeline = Pipeline(retrieval, prompts, engine, warm_up=WarmUp(SystemPrefix(orderer, builder, engine)))

    Errors are logged, not raised.
    """

    def __init__(self, prefix: Prefix[Q]) -> None:
        self.started = 0
        self._prefix = prefix
        self._warming: dict[Hashable, Warming] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, question: Q) -> Warming | None:
        """Start or join a warm-up, which the caller must `leave` after retrieval; None if not needed."""
        try:
            scope = self._prefix.scope(question)
            warming = self._warming.get(scope)
            if warming is not None and warming.join():
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
        task.add_done_callback(lambda done: self._remove(scope, done))
        return warming

    async def close(self) -> None:
        await end_all(self._tasks)

    async def _prefill(self, question: Q) -> None:
        try:
            await self._prefix.prefill(question)
        except Exception as error:
            _logger.debug("a warm-up failed: %s", type(error).__name__)

    def _remove(self, scope: Hashable, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        warming = self._warming.get(scope)
        if warming is not None and warming._task is task:
            del self._warming[scope]
