"""Placement that follows a question server's load (RAGDoll)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ragorder.adapters.batching import BatchingMetrics
from ragorder.pipelining.batching import BatchEvent, DecoupledServer, RequestTrace
from ragorder.pipelining.placement.base import Placement
from ragorder.pipelining.placement.replan import Replanner

_logger = logging.getLogger("ragorder.placement")


class LoadFollower:
    """Observer of a server that moves its placement where that pays, see `Replanner`. For one event loop.

    `describe` returns the log's text about a placement.
    """

    def __init__(
        self,
        replanner: Replanner,
        metrics: BatchingMetrics,
        describe: Callable[[Placement], str],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.replanner = replanner
        self._metrics = metrics
        self._describe = describe
        self._clock = clock
        self._server: DecoupledServer[Any, Any, Any] | None = None
        self._answered: list[RequestTrace] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        metrics.placed(replanner.placed.batch)

    def follow(self, server: DecoupledServer[Any, Any, Any]) -> None:
        self._server = server

    def __call__(self, observed: BatchEvent | RequestTrace) -> None:
        if isinstance(observed, RequestTrace) and observed.outcome == "answered":
            self._answered.append(observed)
        self._changed.set()
        if self._task is None and not self._closed:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                await self._follow()
            except Exception as error:
                self.replanner.failed()
                self._metrics.placed(self.replanner.placed.batch, "failed")
                _logger.warning("the placement stays: %s: %s", type(error).__name__, error)

    async def _follow(self) -> None:
        answered, self._answered = self._answered, []
        for trace in answered:
            if trace.retrieval_began_s is not None and trace.found_s is not None:
                self.replanner.retrieved(trace.found_s - trace.retrieval_began_s)
            began_s, ended_s = trace.generation_began_s, trace.ended_s
            if trace.prompt_tokens and trace.answer_tokens and began_s is not None and ended_s is not None:
                self.replanner.answered(
                    trace.prompt_tokens, trace.answer_tokens, trace.generation_batch, ended_s - began_s
                )
        if self._server is None:
            return
        # A plan takes milliseconds.
        wanted = await asyncio.to_thread(self.replanner.propose, max(1, self._server.unfinished))
        if wanted is None:
            return
        began_s = self._clock()
        await self._server.place(wanted)
        self.replanner.moved(wanted, self._clock() - began_s)
        self._metrics.placed(wanted.batch, "moved")
        _logger.info("%s", self._describe(wanted))
