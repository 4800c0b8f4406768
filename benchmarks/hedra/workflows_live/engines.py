"""Engines that serve workflows in real time, with random weights, on one core."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any, Protocol

from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.endpoint import OpenAIStreams
from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.common.extras import needs
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.pipelining import StreamingEngine

__all__ = ["CAPACITY_TOKENS", "LiveEngine", "LiveTorch", "LiveVLLM", "bind_server", "off_the_engines_core"]

CAPACITY_TOKENS = 32_768
_TOKEN_BUDGET = 512


class LiveEngine(Protocol):
    """`forced`: options that make an answer as long as its `max_tokens`. `token_budget`: prompt tokens of a step."""

    name: str
    block_size: int
    partial_blocks_first: bool
    vocabulary: int
    token_budget: int
    forced: Mapping[str, Any]

    def emptied(self) -> AbstractAsyncContextManager[StreamingEngine[PromptRequest]]:
        """With an empty cache. Raises EngineError."""


class LiveTorch:
    """The embedded engine in this process, a new one each time."""

    name = "torch"
    block_size = 16
    partial_blocks_first = TorchEngine.partial_blocks_first
    token_budget = _TOKEN_BUDGET
    forced: Mapping[str, Any] = {"ignore_eos": True}

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self.vocabulary = model.vocabulary

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[StreamingEngine[PromptRequest]]:
        served = TorchEngine(self._model, capacity_tokens=CAPACITY_TOKENS, max_batch_tokens=_TOKEN_BUDGET)
        worker = EngineWorker(served.engine)
        try:
            yield EmbeddedStreams(worker)
        finally:
            worker.close()


class LiveVLLM:
    """A running vLLM server, through its API."""

    name = "vllm"
    partial_blocks_first = True
    token_budget = 8192
    forced: Mapping[str, Any] = {"extra_body": {"ignore_eos": True}}

    def __init__(self, server: VLLMServer, vocabulary: int) -> None:
        self._server = server
        self.block_size = server.block_size
        self.vocabulary = vocabulary

    @asynccontextmanager
    async def emptied(self) -> AsyncIterator[StreamingEngine[PromptRequest]]:
        from openai import AsyncOpenAI

        address = f"{self._server.base_url}/v1"
        with off_the_engines_core():
            await asyncio.to_thread(self._server.reset)
            async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
                yield OpenAIStreams(client, self._server.model_name)


@contextmanager
def off_the_engines_core() -> Iterator[None]:
    """This thread, and what it starts, leave the last core to a server that is bound to it."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_setaffinity") else set()
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, cores - {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def bind_server(pid: int) -> None:
    """Bind a server and its engine to the last core.

    vLLM's own variable does so with Intel's OpenMP in LD_PRELOAD alone: without, engine and clients would share a core.
    Raises ImportError naming the extra.
    """
    with needs("live", "binding an engine to a core"):
        import psutil
    if hasattr(os, "sched_setaffinity"):
        server = psutil.Process(pid)
        for process in (server, *server.children(recursive=True)):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {max(os.sched_getaffinity(0))})
