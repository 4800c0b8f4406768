"""Workflows served in real time: engines, a large index, and scripted answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.endpoint import OpenAIStreams
from ragorder.adapters.openai.pipelined import PromptLoad, WatchedEngine
from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.benchmarks.common.vectors import index_of
from ragorder.benchmarks.hedra.workflows.cells import System
from ragorder.benchmarks.hedra.workflows.measuring import ordered_prompts, play, stage_by_stage
from ragorder.benchmarks.hedra.workflows.script import Embedder, RankedPrompts, Script, WordTokenizer, compiled
from ragorder.common.extras import needs
from ragorder.document import Document
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.pipelining import AnswerChunk, ContinuousIVF, StreamingEngine
from ragorder.pipelining.search.scanner import one_thread
from ragorder.pipelining.workflow import WorkflowServer

CAPACITY_TOKENS = 32_768
_TOKEN_BUDGET = 512


class LiveEngine(Protocol):
    """`forced`: options that make an answer as long as its `max_tokens`. `token_budget`: prompt tokens of a step."""

    name: str
    block_size: int
    vocabulary: int
    token_budget: int
    forced: Mapping[str, Any]

    def emptied(self) -> AbstractAsyncContextManager[StreamingEngine[PromptRequest]]:
        """With an empty cache. Raises EngineError."""


class LiveTorch:
    """The embedded engine in this process, a new one each time."""

    name = "torch"
    block_size = 16
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


Vectors = NDArray[np.float32]

# Of a copy and its document the cosine is 0.5: less than most questions have with their passage.
_JITTER = 3**0.5
# Vectors a cluster.
_TRAINED_ON = 64


class ScriptedEngine:
    """Computes what `engine` computes, one token for each word of the scripted answer, and streams these instead of the
    tokens. `forced`: options that make the engine compute that number. `prompt_tokens` and `cached_tokens` are its
    reports, `generation_s` the seconds of `generations` that have ended."""

    def __init__(
        self,
        engine: StreamingEngine[PromptRequest],
        answer: Callable[[PromptRequest], Sequence[str]],
        vocabulary: int,
        forced: Mapping[str, Any],
    ) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generations = 0
        self.generation_s = 0.0
        self._engine = engine
        self._answer = answer
        self._vocabulary = vocabulary
        self._forced = forced

    async def stream(self, request: PromptRequest, /) -> AsyncGenerator[AnswerChunk, None]:
        began_s = time.perf_counter()
        words = [f"{word} " for word in self._answer(request)] or [" "]
        asked = replace(
            request,
            token_ids=[token % self._vocabulary for token in request.token_ids or ()],
            options={**request.options, "max_tokens": len(words), **self._forced},
        )
        async with aclosing(self._engine.stream(asked)) as chunks:
            async for chunk in chunks:
                if chunk.usage is None:
                    yield AnswerChunk(words.pop(0) if words else "")
                    continue
                self.prompt_tokens += chunk.usage.prompt_tokens or 0
                self.cached_tokens += chunk.usage.cached_tokens or 0
                self.generations += 1
                self.generation_s += time.perf_counter() - began_s
                yield AnswerChunk("".join(words), chunk.usage)
                words = []


class BatchedSearch:
    """Whole searches on a thread, one after another, or all that wait as one batch."""

    def __init__(self, index: Any, *, batched: bool) -> None:
        self._index = index
        self._most = None if batched else 1
        self._waiting: list[tuple[Vectors, int, asyncio.Future[list[int]]]] = []
        self._searching: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "whole-searches")

    async def search(self, query: Vectors, k: int) -> list[int]:
        loop = asyncio.get_running_loop()
        found: asyncio.Future[list[int]] = loop.create_future()
        self._waiting.append((query, k, found))
        if self._searching is None:
            self._searching = loop.create_task(self._search())
        return await found

    def close(self) -> None:
        self._thread.shutdown()

    async def _search(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :] if self._most else []
            queries = np.concatenate([query for query, _, _ in batch])
            most = max(k for _, k, _ in batch)
            ids = await asyncio.get_running_loop().run_in_executor(self._thread, self._find, queries, most)
            for (_, k, found), row in zip(batch, ids, strict=True):
                if not found.done():
                    found.set_result(row[:k].tolist())
        self._searching = None

    def _find(self, queries: Vectors, k: int) -> NDArray[np.int64]:
        with one_thread():
            ids: NDArray[np.int64] = self._index.search(queries, k)[1]
        return ids


def large_index(documents: Vectors, vectors: int, clusters: int, nprobe: int) -> Any:
    """By inner product. Vector i is the document i % len(documents), or a jittered copy of it."""
    parts = _with_copies(documents, max(vectors, len(documents)))
    # Copies are alike, so the first ones train it. The rest is never in memory beside the index.
    first = list(islice(parts, 1 + _TRAINED_ON * clusters // len(documents)))
    return index_of(chain(first, parts), clusters, np.concatenate(first), min(nprobe, clusters) / clusters)


def _with_copies(documents: Vectors, vectors: int) -> Iterator[Vectors]:
    """The documents, then jittered copies of them, in parts of at most that size."""
    draw = np.random.default_rng(0)
    yield documents
    for start in range(len(documents), vectors, len(documents)):
        noise = draw.standard_normal(documents.shape, np.float32)
        copies = documents + _JITTER * noise / np.linalg.norm(noise, axis=1, keepdims=True)
        yield (copies / np.linalg.norm(copies, axis=1, keepdims=True))[: vectors - start]


def search_ms(index: Any, queries: Vectors) -> float:
    """Median of whole searches, one thread."""
    times = []
    with one_thread():
        for query in queries:
            start_s = time.perf_counter()
            index.search(query[None], 1)
            times.append(1e3 * (time.perf_counter() - start_s))
    return float(np.median(times))


_UNBOUNDED = 1_000_000


@dataclass(frozen=True, slots=True)
class LiveMaterials:
    documents: Sequence[Document]
    index: Any
    embed: Embedder
    script: Script
    engine: LiveEngine


async def serve_live(
    system: System, workflow: str, top_k: int, materials: LiveMaterials, at_s: Sequence[float]
) -> Mapping[str, Any]:
    """Return `rows` and `facts` of requests at these times; each system begins with an empty cache."""
    tokenizer = WordTokenizer()
    graph_of = compiled(workflow, top_k)

    def document(id: int) -> Document:
        return materials.documents[id % len(materials.documents)]

    async with AsyncExitStack() as stack:
        engine = ScriptedEngine(
            await stack.enter_async_context(materials.engine.emptied()),
            lambda request: materials.script.answer(tokenizer.words(request.token_ids or ())),
            materials.engine.vocabulary,
            materials.engine.forced,
        )
        if system.transformations is None:
            searches = BatchedSearch(materials.index, batched=system.searches == "batch")
            stack.callback(searches.close)

            async def retrieve(query: str, k: int) -> list[Document]:
                vector = await asyncio.to_thread(materials.embed.compute, query)
                return [document(id) for id in await searches.search(vector, k) if id >= 0]

            run: Any = stage_by_stage(
                engine,
                RankedPrompts(ordered_prompts(tokenizer, CAPACITY_TOKENS, materials.engine)),
                retrieve,
                lockstep=system.lockstep,
            )
        else:
            search = stack.enter_context(ContinuousIVF(materials.index, cores=1))
            load = PromptLoad(WatchedEngine(engine), token_budget=materials.engine.token_budget)
            server = WorkflowServer(
                engine,
                search,
                materials.embed.compute,
                document,
                ordered_prompts(tokenizer, CAPACITY_TOKENS, materials.engine, load.learn),
                transformations=system.transformations(),
                load=load,
                extra_tokens=None,
                max_requests=_UNBOUNDED,
                max_waiting=_UNBOUNDED,
            )
            run = (await stack.enter_async_context(server)).run

        latency_s, speculations, total_s = await play(run, materials.script, [graph_of] * len(at_s), at_s)
    return {
        "rows": {"latency_s": latency_s},
        "facts": {
            "total_s": total_s,
            "prompt_tokens": engine.prompt_tokens,
            "cached_tokens": engine.cached_tokens,
            "generation_ms": 1e3 * engine.generation_s / max(1, engine.generations),
            **speculations,
        },
    }
