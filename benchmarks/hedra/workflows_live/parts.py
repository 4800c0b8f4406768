"""Real parts whose answers are scripted: an engine, and an index that takes its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.adapters.openai.prompts import PromptRequest
from ragorder.pipelining import AnswerChunk, StreamingEngine
from ragorder.pipelining.search.scanner import one_thread

__all__ = ["BatchedSearch", "ScriptedEngine", "large_index", "search_ms"]

Vectors = NDArray[np.float32]

# Of a copy and its document the cosine is 0.5: less than most questions have with their passage.
_JITTER = 3**0.5
# Vectors a cluster.
_TRAINED_ON = 64


class ScriptedEngine:
    """Computes what `engine` computes, for as many tokens as the scripted answer has words, and streams these instead
    of the tokens. `forced`: options that make the engine compute as many. `prompt_tokens` and `cached_tokens` are its
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
    import faiss

    size = documents.shape[1]
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(size), size, clusters, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1
    parts = _with_copies(documents, max(vectors, len(documents)))
    # Copies are alike, so the first ones train it. The rest is never in memory beside the index.
    first = list(islice(parts, 1 + _TRAINED_ON * clusters // len(documents)))
    index.train(np.concatenate(first))
    for part in chain(first, parts):
        index.add(part)
    index.nprobe = min(nprobe, clusters)
    return index


def _with_copies(documents: Vectors, vectors: int) -> Iterator[Vectors]:
    """The documents, then jittered copies of them, in parts of at most as many."""
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
