"""Real parts: an engine whose weights stream, and an index on disk, both at chosen speeds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.prompts import Question
from ragorder.benchmarks.doll.batching_live.record import BatchingLiveCell
from ragorder.benchmarks.doll.streaming.model import VOCABULARY, write_model
from ragorder.benchmarks.doll.streaming.record import StreamingCell
from ragorder.benchmarks.doll.streaming.source import ThrottledSource, TokenBucket
from ragorder.benchmarks.hedra.staging.measuring import clustered
from ragorder.benchmarks.hedra.workflows_live.parts import ScriptedEngine
from ragorder.document import Document
from ragorder.kernels.engine import TieredEngine
from ragorder.kernels.engine.budgeted import StreamedModel, load_streamed
from ragorder.kernels.engine.request import Update
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.offload import Residency
from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import PartitionedRetrieval
from ragorder.pipelining.search.partition_file import PartitionLists
from ragorder.pipelining.staged._faiss import load_faiss

__all__ = ["ANSWER_TOKENS", "LiveParts", "SlowPartitions", "TimedEngine"]

ANSWER_TOKENS = 32
# Layers ahead of the one that computes.
_SLOTS = 4
_CLUSTERS = 64
# Weights come on while the threads that ask for them wait for a processor or for Python.
_BURST_S = 0.02
# The layers are placed by hand.
_PLENTY = 1 << 50


class SlowPartitions(PartitionedSearch):
    """Partitions that are read, also ahead, at a speed at which a pass over all takes `pass_s`. `reading_s`: in which
    one was read; `reading`: one is."""

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
    """`times`: seconds of each step, and whether a partition was being read when it began; `passes`: how often all
    layers have been read."""

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
        # Moved behind its back, layers come back to the engine's plan: all in memory.
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
