"""Requests served in real time by parts of chosen speeds: streamed weights, and partitions on disk."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder import Orderer, Ordering, PromptBuilder
from ragorder.adapters.batching import ordered_batches
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.prompts import OrderedPrompts, Question
from ragorder.benchmarks.common.vectors import clustered
from ragorder.benchmarks.doll.batching.generation import RateSizes
from ragorder.benchmarks.doll.batching.serving import rates
from ragorder.benchmarks.doll.batching_live.cells import BatchingLiveCell
from ragorder.benchmarks.doll.streaming.cells import StreamingCell
from ragorder.benchmarks.doll.streaming.measuring import VOCABULARY, ThrottledSource, TokenBucket, write_model
from ragorder.benchmarks.hedra.workflows.script import WordTokenizer
from ragorder.benchmarks.hedra.workflows_live.measuring import ScriptedEngine
from ragorder.document import Document
from ragorder.kernels.engine import TieredEngine
from ragorder.kernels.engine.budgeted import StreamedModel, load_streamed
from ragorder.kernels.engine.request import Update
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.offload import Residency
from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import BacklogAware, PartitionedRetrieval
from ragorder.pipelining.batching.partition_file import PartitionLists
from ragorder.pipelining.staged._faiss import load_faiss

ANSWER_TOKENS = 32
# Layers ahead of the one that computes.
_SLOTS = 4
_CLUSTERS = 64
# Weights come on while the threads that ask for them wait for a processor or for Python.
_BURST_S = 0.02
# The layers are placed by hand.
_PLENTY = 1 << 50


class SlowPartitions(PartitionedSearch):
    """Partitions that are read, also ahead, at a speed at which a pass over all takes `pass_s`."""

    def __init__(self, *arguments: Any, pass_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pass_bytes = sum(self.partition_bytes)
        self.reading = False
        self.reading_s = 0.0
        self._bucket = TokenBucket(self.pass_bytes / pass_s)

    def _read(self, partition: int) -> PartitionLists:
        began_s, self.reading = time.perf_counter(), True
        try:
            until_s = self._bucket.take(self.partition_bytes[partition])
            lists = super()._read(partition)
            time.sleep(max(0.0, until_s - time.perf_counter()))
        finally:
            self.reading = False
            self.reading_s += time.perf_counter() - began_s
        return lists


class TimedEngine(TieredEngine):
    """`times`: seconds of each step, and whether a partition was being read; `passes` over all layers."""

    def __init__(self, model: StreamedModel, settings: EngineSettings, search: SlowPartitions) -> None:
        super().__init__(model, None, settings)
        self.times: list[tuple[float, bool]] = []
        self._search = search
        self._layer_bytes = sum(model.weights.layers)

    @property
    def passes(self) -> float:
        stream = self.stats().stream
        return 0.0 if stream is None else stream.bytes / self._layer_bytes

    def step(self) -> list[Update]:
        began_s, beside = time.perf_counter(), self._search.reading
        updates = super().step()
        self.times.append((time.perf_counter() - began_s, beside))
        return updates


@dataclass(frozen=True, slots=True)
class LiveParts:
    """Documents, a vector for each question, and the files of model and index."""

    cell: BatchingLiveCell
    folder: Path
    documents: Sequence[Document]
    queries: NDArray[np.float32]
    seed: int

    @classmethod
    def make(cls, cell: BatchingLiveCell, folder: Path, questions: int, seed: int) -> LiveParts:
        draw = Random(f"documents {seed}")
        words = [
            " ".join(f"w{draw.randrange(10_000)}" for _ in range(cell.document_words)) for _ in range(cell.documents)
        ]
        documents = [Document(f"d{number}", text) for number, text in enumerate(words)]
        faiss = load_faiss()
        vectors = clustered(cell.vectors, cell.dimensions, clusters=cell.documents, seed=seed)
        index = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(cell.dimensions), cell.dimensions, _CLUSTERS, faiss.METRIC_INNER_PRODUCT
        )
        index.train(vectors)
        index.add(vectors)
        # Each search needs every partition, as the paper's do.
        index.nprobe = _CLUSTERS
        faiss.write_index(index, str(folder / "index.faiss"))
        shape = StreamingCell.model_validate(
            {"layers": cell.layers, "hidden_size": cell.hidden_size, "intermediate_size": 4 * cell.hidden_size}
        )
        write_model(folder / "model", shape, seed)
        queries = clustered(questions, cell.dimensions, clusters=cell.documents, seed=seed + 1)
        return cls(cell, folder, documents, queries, seed)

    def document(self, id: int) -> Document:
        return self.documents[id % len(self.documents)]

    @contextmanager
    def search(self) -> Iterator[SlowPartitions]:
        cell = self.cell
        pass_s = cell.pass_s / cell.scale
        with SlowPartitions(self.folder / "index.faiss", cell.partitions, cores=1, pass_s=pass_s) as search:
            yield search

    def retrieval(self, search: SlowPartitions) -> PartitionedRetrieval[Question, Document]:
        return PartitionedRetrieval(search, self._embed, self.document, top_k=self.cell.top_k)

    @contextmanager
    def engine(
        self, capacity_tokens: int, max_requests: int, search: SlowPartitions
    ) -> Iterator[tuple[ScriptedEngine, TimedEngine]]:
        cell = self.cell
        settings = EngineSettings(
            device_bytes=_PLENTY,
            host_bytes=0,
            device_tokens=capacity_tokens,
            device="cpu",
            dtype="float32",
            verify=False,
            max_requests=max_requests,
        )
        size = sum(file.stat().st_size for file in (self.folder / "model").glob("model-[0-9]*.safetensors"))
        streamed = load_streamed(
            self.folder / "model",
            settings,
            source=lambda checkpoint: ThrottledSource(
                checkpoint, size * cell.scale / cell.step_s, 0.0, self.seed, burst_s=_BURST_S
            ),
        )
        engine = TimedEngine(streamed, settings, search)
        # Moved without its knowledge, layers come back to the engine's plan: all in memory.
        engine.move_layers(Residency.spread(cell.layers, 0))
        streamed.streamer.resize(_SLOTS)
        worker = EngineWorker(engine)
        try:
            answer = ("word",) * ANSWER_TOKENS
            streams = EmbeddedStreams(worker)
            yield ScriptedEngine(streams, lambda _: answer, VOCABULARY, {"ignore_eos": True}), engine
        finally:
            worker.close()

    def _embed(self, questions: Sequence[Question]) -> NDArray[np.float32]:
        return self.queries[[int(question.query) for question in questions]]


POLICIES = ("serial", "decoupled")
_BLOCK = 16
_UNBOUNDED = 1_000_000


@dataclass(eq=False, slots=True)
class _Task:
    """A `SearchTask`, answered when `ended` is set."""

    question: Question
    ended: asyncio.Future[None]
    checkpoint: Any = None
    cancel_search: Callable[[], object] | None = None
    abandoned: bool = False


async def serve_live(policy: str, parts: LiveParts, at_s: Sequence[float]) -> Mapping[str, Any]:
    """`rows` and `facts` of requests that arrive at these times."""
    cell = parts.cell
    tokenizer = WordTokenizer()
    builder = PromptBuilder("Answer from these documents.", tokenizer=tokenizer)
    prompt_tokens = (
        cell.top_k * builder.document_tokens(parts.documents[0]) + builder.prefix_tokens + ANSWER_TOKENS + 16
    )
    most = cell.serial_most if policy == "serial" else cell.most
    # A last block in part, and one in which a document branches off.
    capacity = most * (-(-prompt_tokens // _BLOCK) + 1) * _BLOCK
    orderer = Orderer(
        tokens=builder.document_tokens,
        prefix_tokens=builder.prefix_tokens,
        capacity_tokens=capacity,
        block_size=_BLOCK,
        suffix_tokens=ANSWER_TOKENS + 16,
    )
    latency_s = [0.0] * len(at_s)
    prompts = OrderedPrompts(orderer, builder, "token_ids")
    with parts.search() as search, parts.engine(capacity, _most_running(policy, cell), search) as (engine, timed):
        retrieval = parts.retrieval(search)
        # The first step of a process prepares kernels.
        await _generate(engine, prompts, Question("warm-up", max_tokens=ANSWER_TOKENS), [Document("warm-up", "first")])
        engine.prompt_tokens = engine.cached_tokens = 0
        timed.times.clear()
        passes = timed.passes
        start_s = time.perf_counter()

        async def serve_all(run: Callable[[Question], Awaitable[Any]]) -> None:
            async def ask(number: int) -> None:
                await asyncio.sleep(max(0.0, start_s + at_s[number] - time.perf_counter()))
                await run(Question(str(number), max_tokens=ANSWER_TOKENS))
                latency_s[number] = time.perf_counter() - start_s - at_s[number]

            await asyncio.gather(*map(ask, range(len(at_s))))

        if policy == "serial":
            serial = _Serial(parts, retrieval, engine, prompts, len(at_s))
            await serve_all(serial.run)
        else:
            async with ordered_batches(
                engine,
                retrieval,
                orderer=orderer,
                builder=builder,
                prompts="token_ids",
                batching=BacklogAware(most=most),
                kv_limit=capacity,
                max_requests=_UNBOUNDED,
                max_contexts=_UNBOUNDED,
            ) as server:
                await serve_all(server.run)
        total_s = time.perf_counter() - start_s
        tokens = {"prompt_tokens": engine.prompt_tokens, "cached_tokens": engine.cached_tokens}
        times = {
            # Of the weights that stream, in each step.
            "streamed": (timed.passes - passes) / max(1, len(timed.times)),
            "pass_s": search.reading_s * search.pass_bytes / max(1, search.read_bytes),
            "step_s": _median(seconds for seconds, beside in timed.times if not beside),
            "beside_s": _median(seconds for seconds, beside in timed.times if beside),
        }
    rows = {"latency_s": [round(each, 4) for each in latency_s]}
    return {"rows": rows, "facts": {"total_s": total_s, **times, **tokens}}


def _most_running(policy: str, cell: BatchingLiveCell) -> int:
    """KV that requests share makes room for others, where they are batched by their KV."""
    return cell.serial_most if policy == "serial" else 4 * cell.most


def _median(seconds: Iterable[float]) -> float | None:
    found = list(seconds)
    return median(found) if found else None


async def _generate(
    engine: ScriptedEngine, prompts: OrderedPrompts, question: Question, documents: Sequence[Document]
) -> None:
    """An answer from documents by rank."""
    ordering = Ordering(list(documents), list(range(len(documents))))
    request = prompts.request(question.query, ordering, None, question.all_options())
    async with aclosing(engine.stream(request)) as chunks:
        async for _ in chunks:
            pass


class _Serial:
    """Static batches of four minutes' requests: a batch is searched for, then generated, with documents by rank."""

    def __init__(
        self,
        parts: LiveParts,
        retrieval: PartitionedRetrieval[Question, Document],
        engine: ScriptedEngine,
        prompts: OrderedPrompts,
        requests: int,
    ) -> None:
        cell = parts.cell
        rate = rates(cell.arrivals.steps)
        self._start_s = time.perf_counter()
        self._sizes = RateSizes(lambda now_s: rate(now_s * cell.scale), cell.serial_most)
        self._retrieval = retrieval
        self._engine = engine
        self._prompts = prompts
        self._expected = requests
        self._waiting: deque[_Task] = deque()
        self._serving: asyncio.Task[None] | None = None

    async def run(self, question: Question) -> None:
        task = _Task(question, asyncio.get_running_loop().create_future())
        self._waiting.append(task)
        self._expected -= 1
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        await task.ended

    async def _serve(self) -> None:
        while self._waiting:
            now_s = time.perf_counter() - self._start_s
            size = self._sizes.next(len(self._waiting), now_s, last=not self._expected)
            if not size:
                return
            batch = [self._waiting.popleft() for _ in range(size)]
            documents: dict[int, Sequence[Document]] = {}
            async with aclosing(self._retrieval.search_batch(batch)) as results:
                async for place, found in results:
                    if isinstance(found, Exception):
                        raise found
                    documents[place] = found
            await asyncio.gather(
                *(
                    _generate(self._engine, self._prompts, batch[place].question, found)
                    for place, found in documents.items()
                )
            )
            for task in batch:
                task.ended.set_result(None)
