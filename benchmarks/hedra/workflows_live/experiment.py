"""Workflows on real parts, in real time: the suites of kind "workflows-live"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from ragorder.benchmarks.hedra.workflows_live.record import LiveCell, LiveRecord
from ragorder.benchmarks.hedra.workflows_live.systems import SYSTEMS
from ragorder.common.extras import install_hint
from ragorder.common.files import cache_folder
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.machine import load_average
from ragorder.eval.data.retrieval import DenseRetriever, default_model
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.running.load import rotated
from ragorder.eval.running.suite import Experiment, Job, Line, Suite

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.workflows_live.engines import LiveEngine
    from ragorder.benchmarks.hedra.workflows_live.measuring import LiveMaterials
    from ragorder.eval.data.corpora import Corpus

__all__ = ["WorkflowsLive"]

_CAPACITY_REQUESTS = 32
_BLOCK_SIZE = 32
_LONGEST = 8192


class WorkflowsLive(Experiment):
    kind = "workflows-live"
    record = LiveRecord
    cell = LiveCell
    policies: ClassVar[Any] = tuple(SYSTEMS)
    one_job = True
    unit = "runs"
    packages: ClassVar[Any] = {"faiss": "retrieval"}

    def obstacle(self, suite: Suite, cell: LiveCell, policy: str) -> str | None:
        if cell.engine == "vllm" and (find_spec("vllm") is None or find_spec("openai") is None):
            return f"engine = vllm needs vLLM and a client: make vllm, {install_hint('live')}"
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return len(job.policies) + 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.hedra.workflows.script import Script
        from ragorder.benchmarks.hedra.workflows_live.measuring import serve_live
        from ragorder.benchmarks.hedra.workflows_live.parts import search_ms
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: LiveCell = job.cell
        assert job.corpus is not None, "a cell has a corpus"
        key = (cell.corpus, cell.vectors, cell.clusters, cell.engine, cell.shape)
        parts = replace(self.kept(key, lambda: self._materials(job)), script=Script(job.corpus, job.seed))
        parts.index.nprobe = min(cell.nprobe, cell.clusters)

        def serve(policy: str, at_s: list[float]) -> Any:
            with threads(1):
                return asyncio.run(serve_live(SYSTEMS[policy], cell.workflow, cell.top_k, parts, at_s))

        def capacity() -> dict[str, float]:
            full = serve("stages", [0.0] * min(_CAPACITY_REQUESTS, job.requests))
            queries = parts.embed(parts.script.question(0)).repeat(20, axis=0)
            rate = cell.load * len(full["rows"]["latency_s"]) / full["facts"]["total_s"]
            return {"rate": rate, "search_ms": search_ms(parts.index, queries)}

        before = self.measured_before(job)
        shared = capacity() if before is None else {name: before["facts"][name] for name in ("rate", "search_ms")}
        rate = shared["rate"]
        advance()
        at_s = [arrival.at_s for arrival in poisson_arrivals(rate, job.requests, job.seed)]
        # Another policy is first with each seed: a machine's speed drifts within one.
        for policy in rotated(job.policies, job.seed):
            load = load_average()
            found = serve(policy, at_s)
            facts = found["facts"] | shared
            engine = {"name": cell.engine, "model": cell.shape}
            yield {"policy": policy, "engine": engine, "load_average": load, "rows": found["rows"], "facts": facts}
            advance()

    def _materials(self, job: Job) -> LiveMaterials:
        from ragorder.benchmarks.hedra.workflows.embedder import Embedder
        from ragorder.benchmarks.hedra.workflows.script import Script
        from ragorder.benchmarks.hedra.workflows_live.measuring import LiveMaterials
        from ragorder.benchmarks.hedra.workflows_live.parts import large_index
        from ragorder.eval.suites.pipelining.search import embed

        corpus, cell = job.corpus, job.cell
        assert corpus is not None, "a cell has a corpus"
        vectors = embed([each.text for each in corpus.documents], cache_folder())
        index = large_index(vectors, cell.vectors, cell.clusters, cell.nprobe)
        embedder = Embedder(DenseRetriever(default_model()).embed)
        return LiveMaterials(corpus.documents, index, embedder, Script(corpus, job.seed), self._engine(cell, corpus))

    def _engine(self, cell: LiveCell, corpus: Corpus) -> LiveEngine:
        import torch

        from ragorder.benchmarks.hedra.workflows_live.engines import (
            CAPACITY_TOKENS,
            LiveTorch,
            LiveVLLM,
            bind_server,
        )
        from ragorder.benchmarks.kernels.embedded.models import SHAPES
        from ragorder.eval.engines.server import VLLMServer
        from ragorder.kernels.random_model import make_model

        shape = SHAPES[cell.shape]
        if cell.engine == "torch":
            return LiveTorch(shape.make())
        folder = Path(self.resources.enter_context(TemporaryDirectory(prefix="ragorder-live-")))
        texts = [each.text for each in corpus.documents]
        make_model(folder, texts=texts, layers=shape.layers, hidden_size=shape.hidden_size, vocab_size=shape.vocabulary)
        server = VLLMServer(
            folder,
            blocks=CAPACITY_TOKENS // _BLOCK_SIZE,
            max_model_len=_LONGEST,
            environment={"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        self.resources.enter_context(server)
        # A GPU's server needs no core to compute on, and more than one to schedule.
        if server.pid is not None and not torch.cuda.is_available():
            bind_server(server.pid)
        return LiveVLLM(server, shape.vocabulary)
