"""Load of an engine: this pipeline's requests, and its server's count."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from ragorder.adapters.openai.system_prefix import WatchedEngine
from ragorder.adapters.vllm.cache_config import requests_on
from ragorder.common.running_mean import RunningMean
from ragorder.pipelining import EngineLoad, Provisional, Retrieval, prefill_batch

__all__ = ["MetricsPoll", "PromptLoad"]

D = TypeVar("D")
Q = TypeVar("Q")

_INTERVAL_S = 0.1
_LONGEST_INTERVAL_S = 60.0
_TIMEOUT_S = 2.0
_STALE_S = 1.0
# A server renders its metrics in the process that also sends the answers.
_MAX_SHARE = 0.05

_logger = logging.getLogger("ragorder")


class PromptLoad(EngineLoad):
    """Load of a shared engine: other clients' requests count as pending. The default `max_prefill_bs` is the number of
    prompts of mean length in `token_budget`, and 1 before the first prompt."""

    def __init__(
        self,
        engine: WatchedEngine,
        *,
        max_prefill_bs: int | None = None,
        token_budget: int = 8192,
        requests: Callable[[], int | None] | None = None,
    ) -> None:
        def reported() -> int | None:
            count = requests() if requests is not None else None
            return None if count is None else self._pending + max(0, count - engine.running)

        super().__init__(1 if max_prefill_bs is None else max_prefill_bs, reported)
        self._token_budget = token_budget if max_prefill_bs is None else None
        self._mean = RunningMean()

    def learn(self, prompt_tokens: int) -> None:
        if self._token_budget is not None:
            self._mean.add(prompt_tokens)
            self.max_prefill_bs = prefill_batch(self._token_budget, round(self._mean.value or 0))


class MetricsPoll:
    """Number of requests on a vLLM server, polled from its /metrics during searches, at most every 100 ms. None without
    a recent answer."""

    def __init__(self, client: Any, engine: WatchedEngine) -> None:
        self._client = client
        self._engine = engine
        self._url = re.sub(r"/v1/?$", "", str(client.base_url)).rstrip("/") + "/metrics"
        self._searches = 0
        self._others: int | None = None
        self._answered_s = 0.0
        self._interval_s = _INTERVAL_S
        self._next_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def __call__(self) -> int | None:
        if self._others is None or time.monotonic() - self._answered_s > max(_STALE_S, 2 * self._interval_s):
            return None
        # Our own requests change between two polls.
        return self._others + self._engine.running

    def during(self, retrieval: Retrieval[Q, D]) -> Retrieval[Q, D]:
        async def search(question: Q) -> AsyncGenerator[Provisional[D], None]:
            self._searches += 1
            try:
                if self._task is None or self._task.done():
                    self._task = asyncio.create_task(self._poll())
                async with aclosing(retrieval(question)) as stages:
                    async for stage in stages:
                        yield stage
            finally:
                self._searches -= 1

        return search

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def _poll(self) -> None:
        while self._searches:
            if time.monotonic() >= self._next_s:
                await self._poll_once()
                self._next_s = time.monotonic() + self._interval_s
            await asyncio.sleep(_INTERVAL_S)

    async def _poll_once(self) -> None:
        sent_s, ours = time.monotonic(), self._engine.running
        try:
            page = await self._client.get(self._url, cast_to=str, options={"timeout": _TIMEOUT_S, "max_retries": 0})
            present = requests_on(page)
            if present is None:
                raise LookupError("no such metrics")
        except Exception as error:
            self._others = None
            self._interval_s = min(2 * self._interval_s, _LONGEST_INTERVAL_S)
            _logger.debug("the server's load is unknown: %s", type(error).__name__)
        else:
            self._others, self._answered_s = max(0, present - max(ours, self._engine.running)), time.monotonic()
            self._interval_s = max(_INTERVAL_S, (self._answered_s - sent_s) / _MAX_SHARE)
