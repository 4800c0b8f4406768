"""Workflows on real parts, in real time (suites hedra-live and hedra-long)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from ragorder.benchmarks.common.served import late_s, mean_s, seed_by_seed, share_column
from ragorder.benchmarks.common.vectors import embedded
from ragorder.benchmarks.hedra.workflows.cells import System
from ragorder.benchmarks.hedra.workflows.experiment import SYSTEMS as VIRTUAL
from ragorder.benchmarks.hedra.workflows.script import WORKFLOWS
from ragorder.common.extras import install_hint
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.data.retrieval import DenseRetriever
from ragorder.eval.engines.torch import lacks_torch
from ragorder.eval.report.declared import Block, Column, Row, TableForm, figure
from ragorder.eval.report.words import format_number, interval_words
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.load import rotated
from ragorder.eval.running.suite import Experiment, Job, Line, Suite
from ragorder.kernels.preprocessing.encoder import default_model

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.workflows_live.measuring import LiveEngine, LiveMaterials
    from ragorder.eval.data.corpora import Corpus


class LiveCell(SuiteCell):
    """Requests at a `load` of the rate at which a full queue is served stage by stage. The index has the corpus and
    jittered copies of it, `vectors` in all, in `clusters`; a search scans `nprobe` of them. Answers are computed by
    the embedded engine, or by a vLLM server, on a model of one `shape`."""

    corpus: str = "nqopen"
    workflow: Annotated[str, one_of("workflow", WORKFLOWS)] = "irg"
    load: float = Field(0.8, gt=0)
    vectors: int = Field(300_000, ge=100)
    clusters: int = Field(512, ge=1)
    nprobe: int = Field(256, ge=1)
    top_k: int = Field(5, ge=1, le=20)
    engine: Literal["torch", "vllm"] = "torch"
    shape: Literal["tiny", "small"] = "small"
    requests: int = Field(120, ge=1)


SYSTEMS = {
    "lockstep": System("batches stage by stage", "alone", lockstep=32),
    "stages": System("stage by stage", "alone"),
    "batched": System("whole searches batched", "batch"),
    "hedra": VIRTUAL["hedra"],
    "hedra+order": VIRTUAL["hedra+order"],
}
"""By policy. One core searches, another computes."""

_CAPACITY_REQUESTS = 32
_BLOCK_SIZE = 32
_LONGEST = 8192
_ENGINES = {"torch": "the embedded engine", "vllm": "vLLM"}


def _title(block: Block) -> str:
    cell, runs = block.cell, block.runs
    rate, search_ms = (fmean(float(run.facts[name]) for run in runs) for name in ("rate", "search_ms"))
    title = f"{cell.workflow} on {_ENGINES[cell.engine]}, load {cell.load:g}: {rate:.2f} requests/s, "
    title += f"searches of {search_ms:.0f} ms"
    baseline = [
        each.facts["generation_ms"] for each in runs if each.policy == "stages" and "generation_ms" in each.facts
    ]
    return title + (f", generations of {fmean(baseline):.0f} ms" if baseline else "")


def _times_column(our: str) -> Column:
    def entry(row: Row) -> str:
        found = seed_by_seed(row.group, our, row.policy)
        if found is None:
            return format_number(None)
        times = format_number(1 + found.difference, 2)
        if not found.known or row.policy == our:
            return times
        return f"{times} {interval_words(found, 2, lambda change: 1 + change)}"

    return Column(f"÷ {our}", entry)


class WorkflowsLive(Experiment):
    """Column `latency_s`. Facts: the rate, milliseconds of a whole search and of a generation, and those of `serve`."""

    kind = "workflows-live"
    cell = LiveCell
    columns = ("latency_s",)
    facts = ("rate", "search_ms", "total_s", "prompt_tokens", "cached_tokens")
    runs = True
    policies: ClassVar[Any] = tuple(SYSTEMS)
    one_job = True
    unit = "runs"
    words = (
        "Real are FAISS, MiniLM, the engine and their times on this machine; the model's weights are random, and "
        "answers are scripted: nothing is said about answers. One core searches and one computes.",
    )
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    tables = (
        TableForm(
            _title,
            [
                Column("", lambda row: f"{row.policy}: {SYSTEMS[row.policy].words}"),
                figure("mean, s", mean_s, 3),
                figure("p99, s", late_s, 3),
                share_column("cached, %", "cached_tokens", "prompt_tokens"),
                share_column("later, %", "later_cached_tokens", "later_prompt_tokens"),
                share_column("right, %", "right", "speculations"),
                *map(_times_column, ("hedra", "hedra+order")),
            ],
            note="Cached: of all prompt tokens; later: of those after a request's first generation; right: of "
            "speculative generations; ÷: mean latency, times that of ours, and its 95 % interval (Student's, over the "
            "seeds). A generation: stage by stage, under this load.",
            policies=tuple(SYSTEMS),
        ),
    )

    def obstacle(self, suite: Suite, cell: LiveCell, policy: str) -> str | None:
        if cell.engine == "vllm" and (find_spec("vllm") is None or find_spec("openai") is None):
            return f"engine = vllm needs vLLM and a client: make vllm, {install_hint('live')}"
        return lacks_torch() or super().obstacle(suite, cell, policy)

    def steps(self, job: Job) -> int:
        return len(job.policies) + 1

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        from ragorder.benchmarks.hedra.workflows.script import Script
        from ragorder.benchmarks.hedra.workflows_live.measuring import search_ms, serve_live
        from ragorder.benchmarks.kernels.embedded.models import threads

        cell: LiveCell = job.cell
        assert job.corpus is not None, "a cell has a corpus"
        key = (cell.corpus, cell.vectors, cell.clusters, cell.engine, cell.shape)
        parts = replace(self.kept(key, lambda: self.materials(job)), script=Script(job.corpus, job.seed))
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
            found = serve(policy, at_s)
            facts = found["facts"] | shared
            engine = {"name": cell.engine, "model": cell.shape}
            yield {"policy": policy, "engine": engine, "rows": found["rows"], "facts": facts}
            advance()

    def materials(self, job: Job) -> LiveMaterials:
        from ragorder.benchmarks.hedra.workflows.script import Embedder, Script
        from ragorder.benchmarks.hedra.workflows_live.measuring import LiveMaterials, large_index

        corpus, cell = job.corpus, job.cell
        assert corpus is not None, "a cell has a corpus"
        vectors = embedded(each.text for each in corpus.documents)
        index = large_index(vectors, cell.vectors, cell.clusters, cell.nprobe)
        embedder = Embedder(DenseRetriever(default_model()).embed)
        return LiveMaterials(corpus.documents, index, embedder, Script(corpus, job.seed), self._engine(cell, corpus))

    def _engine(self, cell: LiveCell, corpus: Corpus) -> LiveEngine:
        import torch

        from ragorder.benchmarks.hedra.workflows_live.measuring import (
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
