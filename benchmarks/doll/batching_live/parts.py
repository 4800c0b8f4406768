"""Parts of chosen speeds within one memory: streamed weights, partitions on disk, and their plan."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragorder import PromptBuilder
from ragorder.adapters.embedded import EngineWorker
from ragorder.adapters.openai.prompts import Question
from ragorder.benchmarks.common.vectors import A_CENTROID, clustered, index_of
from ragorder.benchmarks.doll.batching_live.cells import POLICIES, SERIAL, BatchingLiveCell
from ragorder.benchmarks.doll.streaming.cells import StreamingCell
from ragorder.benchmarks.doll.streaming.measuring import ThrottledSource, TokenBucket, write_model
from ragorder.benchmarks.hedra.workflows.script import WordTokenizer
from ragorder.document import Document
from ragorder.kernels.engine import TieredEngine
from ragorder.kernels.engine.budgeted import StreamedModel, load_streamed
from ragorder.kernels.engine.request import Update
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.model_sizes import model_sizes
from ragorder.pipelining import PartitionedSearch
from ragorder.pipelining.batching import PartitionedRetrieval
from ragorder.pipelining.batching.partition_file import PartitionLists
from ragorder.pipelining.placement.base import IndexSizes, ModelSizes, Placement, Spread, Workload
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.costs import EstimatedCosts, Footprint, Rates
from ragorder.pipelining.placement.profile import index_sizes
from ragorder.pipelining.staged._faiss import load_faiss

PARTITIONS = 32
ANSWER_TOKENS = 32
UNBOUNDED = 1_000_000

_TOP_K = 5
_STEP_TOKENS = 256
# Clusters in each partition, and their share that a search of lists needs.
_CLUSTERS_EACH = {"partitions": 2, "lists": 16}
_NEAREST = 1 / 16
# Requests whose searches share what is read of lists, for the plan.
_TOGETHER = 32
# Weights come on while the threads that ask for them wait for a processor or for Python.
_BURST_S = 0.02
# The placement is set at once.
_PLENTY = 1 << 50
# Of a core: multiplications and additions, bytes of weights in a step of one request, of an index scan.
_FLOPS, _MEMORY, _SCAN = 35e9, 4.6e9, 1e9
# Fewer than the model's vocabulary.
_WORDS = 900
_DIGITS = 6


class SlowSearch(PartitionedSearch):
    """Partitions that are read, also ahead, at a speed at which all take `pass_s`."""

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


class LiveRetrieval(PartitionedRetrieval[Question, Document]):
    """A retrieval whose partitions of a placement are `each` of the search's."""

    def __init__(self, search: SlowSearch, *arguments: Any, each: int, **options: Any) -> None:
        super().__init__(search, *arguments, **options)
        self._each = each

    @property
    def resident(self) -> int:
        return super().resident // self._each

    def resize(self, partitions: int) -> None:
        super().resize(self._each * partitions)


class TimedEngine(TieredEngine):
    """`times`: seconds of each step, and whether a partition was being read; `passes` over all layers. With `slots`
    every placement has these buffers, and no step more."""

    def __init__(self, model: StreamedModel, settings: EngineSettings, search: SlowSearch, slots: int | None) -> None:
        super().__init__(model, None, settings)
        self.times: list[tuple[float, bool]] = []
        self.streamer = model.streamer
        self._search = search
        self._slots = slots
        self._layer_bytes = sum(model.weights.layers)

    @property
    def passes(self) -> float:
        return self.streamer.stats.bytes / self._layer_bytes

    def place(self, placement: Placement) -> None:
        if self._slots is None:
            super().place(placement)
            return
        super().place(replace(placement, slots=min(placement.slots, self._slots)))
        self.streamer.room = lambda tokens: 0

    def step(self) -> list[Update]:
        began_s, beside = time.perf_counter(), self._search.reading
        updates = super().step()
        self.times.append((time.perf_counter() - began_s, beside))
        return updates


@dataclass(frozen=True)
class LiveParts:
    """Documents, a vector for each question, the files of model and index, and what they cost."""

    cell: BatchingLiveCell
    folder: Path
    documents: Sequence[Document]
    queries: NDArray[np.float32]
    builder: PromptBuilder
    sizes: ModelSizes
    index: IndexSizes
    recall: float
    seed: int

    @classmethod
    def make(cls, cell: BatchingLiveCell, folder: Path, questions: int, seed: int) -> LiveParts:
        draw = Random(f"documents {seed}")
        texts = [
            " ".join(f"w{draw.randrange(_WORDS)}" for _ in range(cell.document_words)) for _ in range(cell.documents)
        ]
        documents = [Document(f"d{number}", text) for number, text in enumerate(texts)]
        queries = clustered(questions, cell.dimensions, clusters=cell.documents, seed=seed + 1)
        recall = _write_index(folder / "index.faiss", cell, queries, seed)
        shape = StreamingCell.model_validate(
            {"layers": cell.layers, "hidden_size": cell.hidden_size, "intermediate_size": 4 * cell.hidden_size}
        )
        write_model(folder / "model", shape, seed)
        builder = PromptBuilder("Answer from these documents.", tokenizer=WordTokenizer())
        sizes = model_sizes(folder / "model", dtype="float32")
        index = index_sizes(folder / "index.faiss", PARTITIONS)
        return cls(cell, folder, documents, queries, builder, sizes, index, recall, seed)

    def document(self, id: int) -> Document:
        return self.documents[id % len(self.documents)]

    def question(self, number: int) -> Question:
        """Each is of one length, and has an answer of one length."""
        return Question(" ".join(f"{number:0{_DIGITS}}"), max_tokens=ANSWER_TOKENS, options={"ignore_eos": True})

    def workload(self, top_k: int) -> Workload:
        """All prompts are of one length, up to the question's."""
        each = self.builder.document_tokens(self.documents[0])
        prompt = self.builder.prefix_tokens + top_k * each + self.builder.suffix_tokens(self.question(0).query)
        return Workload(prompt_tokens=prompt, answer_tokens=ANSWER_TOKENS)

    @cached_property
    def costs(self) -> EstimatedCosts:
        """Partitions are read at another speed than layers, and a batch reads a share of them."""
        cell, size = self.cell, sum(self.index.partitions)
        layers = sum(self.sizes.layers) * cell.scale / cell.step_s
        batches = sorted({1 << power for power in range(cell.most.bit_length())} | {cell.serial_most, cell.most})
        share = 1.0 if cell.index == "partitions" else 1 - (1 - _NEAREST) ** _TOGETHER
        return EstimatedCosts(
            self.sizes,
            Rates(flops=_FLOPS, device=_MEMORY, host=_MEMORY, disk=layers, scan=_SCAN),
            self.index,
            self.workload(cell.top_k),
            [batch for batch in batches if batch <= cell.most],
            _STEP_TOKENS,
            reading=share * layers * cell.pass_s / (cell.scale * size),
            scan_s=share * size / _SCAN,
        )

    @cached_property
    def serial(self) -> Placement:
        """No layer and no partition in memory, and KV for as many requests as these documents allow."""
        cell = self.cell
        usual, each = self.workload(_TOP_K), self.workload(cell.top_k)
        kv = self.sizes.kv(usual.kv_tokens(cell.serial_most), cell.serial_most)
        most = cell.serial_most
        while most > 1 and self.sizes.kv(each.kv_tokens(most), most) > kv:
            most -= 1
        step_tokens, slots = max(_STEP_TOKENS, cell.serial_most), POLICIES[SERIAL].slots or 1
        return Placement(Spread(disk=cell.layers), Spread(device=kv), 0, most, step_tokens, slots)

    @property
    def budgets(self) -> Budgets:
        """One memory, which the serial placement fills."""
        full = replace(self.serial, batch=self.cell.serial_most)
        used = Footprint(self.sizes, self.index).total(full)
        return Budgets(used.device + used.host, used.device + used.host, unified=True)

    @contextmanager
    def search(self) -> Iterator[SlowSearch]:
        cell = self.cell
        each = _CLUSTERS_EACH[cell.index] if cell.index == "lists" else 1
        with SlowSearch(
            self.folder / "index.faiss", PARTITIONS * each, cores=1, pass_s=cell.pass_s / cell.scale
        ) as search:
            yield search

    def retrieval(self, search: SlowSearch) -> LiveRetrieval:
        each = search.partitions // PARTITIONS
        return LiveRetrieval(search, self._embed, self.document, top_k=self.cell.top_k, each=each)

    @contextmanager
    def engine(
        self, placement: Placement, search: SlowSearch, slots: int | None = None
    ) -> Iterator[tuple[EngineWorker, TimedEngine]]:
        cell = self.cell
        settings = EngineSettings(
            device_bytes=_PLENTY,
            host_bytes=0,
            device_tokens=placement.kv.device // self.sizes.kv_token,
            device="cpu",
            dtype="float32",
            verify=False,
            max_requests=placement.batch,
            max_batch_tokens=placement.step_tokens,
        )
        bytes_s = sum(self.sizes.layers) * cell.scale / cell.step_s
        streamed = load_streamed(
            self.folder / "model",
            settings,
            # The system's copy stands for the paper's host memory, from which a bus reads.
            source=lambda checkpoint: ThrottledSource(
                checkpoint, bytes_s, 0.0, self.seed, cold=False, burst_s=_BURST_S
            ),
        )
        engine = TimedEngine(streamed, settings, search, slots)
        worker = EngineWorker(engine, max_unfinished=UNBOUNDED)
        try:
            # Placed at once: the engine's own plan has all layers in memory.
            engine.place(placement)
            yield worker, engine
        finally:
            worker.close()

    def _embed(self, questions: Sequence[Question]) -> NDArray[np.float32]:
        return self.queries[[int(question.query.replace(" ", "")) for question in questions]]


def _write_index(path: Path, cell: BatchingLiveCell, queries: NDArray[np.float32], seed: int) -> float:
    """Return the share of the queries' nearest vectors that a search finds."""
    faiss = load_faiss()
    clusters = PARTITIONS * _CLUSTERS_EACH[cell.index]
    vectors = clustered(cell.vectors, cell.dimensions, clusters=cell.documents, seed=seed)
    # A search of partitions needs every one, as the paper's do.
    nprobe = 1.0 if cell.index == "partitions" else _NEAREST
    index = index_of([vectors], clusters, vectors[: A_CENTROID * clusters], nprobe)
    faiss.write_index(index, str(path))
    if cell.index == "partitions":
        return 1.0
    _, true = faiss.knn(queries, vectors, cell.top_k, faiss.METRIC_INNER_PRODUCT)
    _, found = index.search(queries, cell.top_k)
    hits = sum(len(np.intersect1d(ours, theirs)) for ours, theirs in zip(found, true, strict=True))
    return float(hits / true.size)
