"""Workflows whose engine, and perhaps search, are elsewhere, on a virtual clock (suite hedra-elsewhere)."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from zlib import crc32

import numpy as np
from pydantic import Field

from ragorder.benchmarks.common.served import mean_s, seed_by_seed
from ragorder.benchmarks.common.vectors import build_index
from ragorder.benchmarks.common.virtual.costs import EngineCosts, SearchCosts
from ragorder.benchmarks.common.virtual.engine import VirtualEngine
from ragorder.benchmarks.common.virtual.loop import run_virtual
from ragorder.benchmarks.common.virtual.search import VirtualIVF, WholeSearches
from ragorder.benchmarks.hedra.workflows.cells import CLUSTERS
from ragorder.benchmarks.hedra.workflows.measuring import ordered_prompts, play, stage_by_stage
from ragorder.benchmarks.hedra.workflows.script import (
    WORKFLOWS,
    RankedPrompts,
    Script,
    WordTokenizer,
    compiled,
    without_marks,
)
from ragorder.eval.data.arrivals import poisson_arrivals
from ragorder.eval.report.declared import Column, Row, TableForm, figure, policy_column, ratio
from ragorder.eval.report.words import format_number, interval_words
from ragorder.eval.running.cells import SuiteCell, one_of
from ragorder.eval.running.suite import Experiment, Job, Line
from ragorder.pipelining import EngineLoad, prefill_batch
from ragorder.pipelining.workflow import CompiledGraph, WorkflowResult, WorkflowServer, irg
from ragorder.pipelining.workflow.pricing import EXTRA_TOKENS

if TYPE_CHECKING:
    from ragorder.document import Document

# Near those of an 8B model on an H100; a sequence costs little.
ENGINE = EngineCosts(8e-3, 32e-6, 0.0, capacity_tokens=400_000, sequence_s=3e-5)
_NPROBE, _VECTORS, _CORES = 256, 38_000_000, 8
POLICIES = {
    "stages": "stage by stage",
    "asyncio": "known searches at once",
    "hedra": "ours",
    "hedra-free": "ours, without a budget",
}


class ElsewhereCell(SuiteCell):
    """A search of `search_ms`, by a function that waits for a server elsewhere ("remote"), or of an index in this
    process on one of its 8 cores. `sequence_us`: what each sequence adds to a step of the engine."""

    corpus: str = "nqopen"
    workflow: Annotated[str, one_of("workflow", WORKFLOWS)] = "irg"
    search: Literal["remote", "index"] = "remote"
    search_ms: float = Field(40.0, gt=0)
    rate: float = Field(1.0, gt=0)
    sequence_us: float = Field(30.0, ge=0)
    requests: int = Field(25, ge=1)


class Elsewhere(Experiment):
    kind = "workflows-elsewhere"
    cell = ElsewhereCell
    columns = ("latency_s",)
    facts = ("engine_tokens", "engine_requests", "embeddings", "right", "speculations")
    runs = True
    policies: ClassVar[Any] = tuple(POLICIES)
    unit = "runs"
    counts = "policies"
    packages: ClassVar[Any] = {"faiss": "retrieval"}
    tables: ClassVar[Any] = (
        TableForm(
            "{cell.workflow}: mean latency, and what is spent",
            [
                Column("search", lambda row: f"{row.cell.search}, {row.cell.search_ms:g} ms"),
                Column("rate", lambda row: f"{row.cell.rate:g}/s"),
                Column("sequence", lambda row: f"{row.cell.sequence_us:g} µs"),
                policy_column("system", POLICIES),
                figure("mean latency, s", mean_s, 2),
                Column("stage by stage ÷ it", lambda row: _shorter(row, "stages")),
                Column("known at once ÷ it", lambda row: _shorter(row, "asyncio")),
                ratio("engine tokens", "engine_tokens", "stages"),
                ratio("engine requests", "engine_requests", "stages"),
                ratio("embeddings", "embeddings", "stages"),
            ],
            note="Mean of {seeds} seeds, with 95 % intervals of the ratio over them; what is spent, ÷ stage by stage.",
            labels=4,
            by=("workflow",),
            sort=("search_ms", "rate", "sequence_us"),
        ),
    )

    def measure(self, job: Job, advance: Callable[[], None]) -> Iterator[Line]:
        corpus, cell = job.corpus, job.cell
        assert corpus is not None, "a cell has a corpus"
        embed, index = self.kept(cell.corpus, lambda: self._materials(corpus))
        at_s = [arrival.at_s for arrival in poisson_arrivals(cell.rate, job.requests, job.seed)]
        for policy in job.policies:
            engine = {"name": "virtual", "model": "elsewhere"}
            serving = serve(policy, cell, corpus.documents, index, embed, Script(corpus, job.seed), at_s)
            yield {"policy": policy, "engine": engine, **run_virtual(serving)}
            advance()

    @staticmethod
    def _materials(corpus: Any) -> tuple[WordVectors, Any]:
        embed = WordVectors([each.text for each in corpus.documents])
        vectors = np.concatenate([embed(each.text) for each in corpus.documents])
        return embed, build_index(vectors, _NPROBE / CLUSTERS)


class WordVectors:
    """Vectors of texts without a model: the sum of random vectors of their words, rare ones weighted more."""

    def __init__(self, texts: Sequence[str], dimensions: int = 128) -> None:
        self._dimensions = dimensions
        counts = Counter(word for text in texts for word in _words(text))
        self._rarity = {word: math.log(len(texts) / count) for word, count in counts.items()}
        self._most = math.log(len(texts))
        self._known: dict[str, Any] = {}

    def __call__(self, text: str) -> Any:
        vector = np.full((1, self._dimensions), 1e-6, np.float32)
        for word in _words(text):
            if word not in self._known:
                draw = np.random.default_rng(crc32(word.encode()))
                weight = self._rarity.get(word, self._most)
                self._known[word] = weight * draw.normal(size=self._dimensions).astype(np.float32)
            vector += self._known[word]
        return vector / np.linalg.norm(vector)


def _words(text: str) -> list[str]:
    return sorted(set(re.findall(r"\w+", without_marks(text).lower())))


async def serve(
    policy: str,
    cell: ElsewhereCell,
    documents: Sequence[Document],
    index: Any,
    embedder: WordVectors,
    script: Script,
    at_s: Sequence[float],
) -> Mapping[str, Any]:
    loop, tokenizer, embeddings = asyncio.get_running_loop(), WordTokenizer(), 0
    search_s = cell.search_ms / 1000
    scan = SearchCosts(
        code_s=search_s * CLUSTERS / _NPROBE / _VECTORS, vectors=_VECTORS, clusters=CLUSTERS, busy_cores=_CORES
    )
    costs = replace(ENGINE, sequence_s=1e-6 * cell.sequence_us)
    engine = VirtualEngine[Any](costs, lambda request: script.answer(tokenizer.words(request.token_ids or ())))
    prompts = ordered_prompts(tokenizer, costs.capacity_tokens, engine.cache)
    graph = _shipped(cell.workflow)
    whole = WholeSearches(index, scan, batched=False)

    async def remote(vector: Any, k: int) -> list[int]:
        await asyncio.sleep(search_s)
        return [int(id) for id in index.search(vector, k)[1][0]]

    async def embed(text: str) -> Any:
        nonlocal embeddings
        embeddings += 1
        return embedder(text)

    async def retrieve(query: str, k: int) -> list[Document]:
        vector = await embed(query)
        ids = await (remote(vector, k) if cell.search == "remote" else whole.search(vector, k))
        return [documents[int(id)] for id in ids if id >= 0]

    async with AsyncExitStack() as stack:
        if policy in ("stages", "asyncio"):
            ask = stage_by_stage if policy == "stages" else _known_at_once
            run = ask(engine, RankedPrompts(prompts), retrieve)
        else:
            server = WorkflowServer(
                engine,
                remote if cell.search == "remote" else VirtualIVF(index, scan),
                embed,
                documents.__getitem__,
                prompts,
                load=EngineLoad(prefill_batch(costs.token_budget, 512), clock=loop.time),
                max_requests=len(at_s),
                clock=loop.time,
                extra_tokens=None if policy == "hedra-free" else EXTRA_TOKENS,
            )
            run = (await stack.enter_async_context(server)).run
        latency_s, facts, _ = await play(run, script, [(graph, {})] * len(at_s), at_s)
    return {
        "rows": {"latency_s": latency_s},
        "facts": {
            "engine_tokens": engine.prompt_tokens + engine.decoded_tokens,
            "engine_requests": engine.sent,
            "embeddings": embeddings,
            "right": facts["right"],
            "speculations": facts["speculations"],
        },
    }


def _shipped(workflow: str) -> CompiledGraph:
    """Return a workflow with its defaults, and prompts that the script knows."""
    if workflow == "irg":
        return irg(prompt="#draft Answer using {docs}: {query}").compile()
    return compiled(workflow, 2 if workflow == "multistep" else 5)[0]


def _known_at_once(
    engine: Any, prompts: Any, retrieve: Callable[[str, int], Coroutine[Any, Any, Sequence[Document]]]
) -> Callable[..., Awaitable[WorkflowResult]]:
    """A `run` stage by stage that searches for all subquestions of a plan as soon as it is there."""

    async def run(graph: CompiledGraph, question: str, *, state: Mapping[str, Any]) -> WorkflowResult:
        begun: dict[str, asyncio.Task[Sequence[Document]]] = {}

        async def found(query: str, k: int) -> Sequence[Document]:
            return await (begun.pop(query) if query in begun else retrieve(query, k))

        plan: Any
        search: Any
        plan, search = graph.nodes.get("plan"), graph.nodes.get("search")
        if plan is not None:

            def parse(text: str, state: Any) -> Any:
                subquestions = plan.parse(text, state)
                begun.update({each: asyncio.create_task(retrieve(each, search.topk)) for each in subquestions})
                return subquestions

            graph = replace(graph, nodes=MappingProxyType({**graph.nodes, "plan": replace(plan, parse=parse)}))
        return await stage_by_stage(engine, prompts, found)(graph, question, state=state)

    return run


def _shorter(row: Row, baseline: str) -> str:
    times = seed_by_seed(row.group, row.policy, baseline)
    if times is None:
        return format_number(None)
    return f"{format_number(1 + times.difference, 2)} {interval_words(times, 2, lambda difference: 1 + difference)}"
