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
from ragorder.document import Document
from ragorder.eval.experiments.batching_live.record import BatchingLiveCell
from ragorder.eval.experiments.staging.measuring import clustered
from ragorder.eval.experiments.streaming.model import VOCABULARY, write_model
from ragorder.eval.experiments.streaming.record import StreamingCell
from ragorder.eval.experiments.streaming.source import ThrottledSource
from ragorder.eval.experiments.workflows_live.parts import ScriptedEngine
from ragorder.kernels.engine import TieredEngine
from ragorder.kernels.engine.streamed import load_streamed
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.offload import Residency
from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import PartitionedRetrieval
from ragorder.pipelining.staged._faiss import load_faiss

__all__ = ["ANSWER_TOKENS", "LiveParts", "SlowRetrieval"]

ANSWER_TOKENS = 32
# Layers ahead of the one that computes.
_SLOTS = 4
_CLUSTERS = 64
# The layers are placed by hand.
_PLENTY = 1 << 50


class SlowRetrieval(PartitionedRetrieval[Question, Document]):
    """Partitions that are read at `bytes_s`."""

    def __init__(self, *arguments: Any, bytes_s: float, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bytes_s = bytes_s

    def _advance(self, *arguments: Any) -> Any:
        started_s, before = time.perf_counter(), self.index.read_bytes
        found = super()._advance(*arguments)
        due_s = started_s + (self.index.read_bytes - before) / self._bytes_s
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return found


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
    def retrieval(self) -> Iterator[SlowRetrieval]:
        cell = self.cell
        with PartitionedSearch(self.folder / "index.faiss", cell.partitions, cores=1) as search:
            bytes_s = sum(search.partition_bytes) * cell.scale / cell.pass_s
            yield SlowRetrieval(search, self._embed, self.document, top_k=cell.top_k, bytes_s=bytes_s)

    @contextmanager
    def engine(self, capacity_tokens: int, max_requests: int) -> Iterator[ScriptedEngine]:
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
            source=lambda checkpoint: ThrottledSource(checkpoint, size * cell.scale / cell.step_s, 0.0, self.seed),
        )
        engine = TieredEngine(streamed, None, settings)
        streamed.streamer.move(Residency.spread(cell.layers, 0))
        streamed.streamer.resize(_SLOTS)
        worker = EngineWorker(engine)
        try:
            answer = ("word",) * ANSWER_TOKENS
            yield ScriptedEngine(EmbeddedStreams(worker), lambda _: answer, VOCABULARY, {"ignore_eos": True})
        finally:
            worker.close()

    def _embed(self, questions: Sequence[Question]) -> NDArray[np.float32]:
        return self.queries[[int(question.query) for question in questions]]
