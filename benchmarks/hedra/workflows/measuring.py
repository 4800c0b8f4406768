"""Workflows served by one system on the virtual clock, stage by stage or by the product's server."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ragorder import Orderer
from ragorder.adapters.openai.prompts import OrderedPrompts, PromptRequest
from ragorder.adapters.workflows import WorkflowPrompts
from ragorder.benchmarks.common.virtual.costs import SearchCosts
from ragorder.benchmarks.common.virtual.engine import VirtualEngine
from ragorder.benchmarks.common.virtual.search import VirtualIVF, WholeSearches
from ragorder.benchmarks.hedra.workflows.cells import FAST, MODELS, SEARCH, System, WorkflowsCell
from ragorder.benchmarks.hedra.workflows.script import Embedder, RankedPrompts, Script, WordTokenizer, compiled
from ragorder.document import Document
from ragorder.pipelining import AnswerChunk, EngineLoad, EngineRequest, RequestBuilder, StreamingEngine, prefill_batch
from ragorder.pipelining.workflow import CompiledGraph, NodeQuestion, WorkflowResult, WorkflowServer, interpret
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.benchmarks.hedra.tiers.index_tiers import VirtualTiers

R = TypeVar("R", bound=EngineRequest)
T = TypeVar("T")
Retrieve = Callable[[str, int], Awaitable[Sequence[Document]]]


class Stages:
    """A barrier before each stage of a batch's requests, for those that have not ended."""

    def __init__(self, requests: int) -> None:
        self._running = requests
        self._reached: list[asyncio.Future[None]] = []

    async def reach(self) -> None:
        reached = asyncio.get_running_loop().create_future()
        self._reached.append(reached)
        self._release()
        await reached

    def leave(self) -> None:
        self._running -= 1
        self._release()

    def engine(self, engine: StreamingEngine[R]) -> StreamingEngine[R]:
        return _StagedEngine(engine, self)

    def _release(self) -> None:
        if len(self._reached) == self._running:
            for reached in self._reached:
                reached.set_result(None)
            self._reached = []


class Lockstep:
    """Runs requests in batches of at most `limit`: what comes during one is in the next."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[asyncio.Future[Stages]] = deque()
        self._running = 0

    async def run(self, request: Callable[[Stages], Awaitable[T]]) -> T:
        turn: asyncio.Future[Stages] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._begin()
        stages = await turn
        try:
            return await request(stages)
        finally:
            stages.leave()
            self._running -= 1
            self._begin()

    def _begin(self) -> None:
        if self._running:
            return
        self._running = min(self._limit, len(self._waiting))
        stages = Stages(self._running)
        for _ in range(self._running):
            self._waiting.popleft().set_result(stages)


class _StagedEngine(Generic[R]):
    def __init__(self, engine: StreamingEngine[R], stages: Stages) -> None:
        self._engine = engine
        self._stages = stages

    async def stream(self, request: R, /) -> AsyncGenerator[AnswerChunk, None]:
        await self._stages.reach()
        async with aclosing(self._engine.stream(request)) as chunks:
            async for chunk in chunks:
                yield chunk


def stage_by_stage(
    engine: StreamingEngine[R],
    prompts: RequestBuilder[NodeQuestion, Document, R],
    retrieve: Retrieve,
    *,
    lockstep: int | None = None,
) -> Callable[..., Awaitable[WorkflowResult]]:
    """A `run` like a WorkflowServer's. `lockstep`: the most requests of a batch."""
    batches = Lockstep(lockstep) if lockstep else None

    async def run(graph: CompiledGraph, question: str, *, state: Mapping[str, Any]) -> WorkflowResult:
        if batches is None:
            return await interpret(graph, question, engine=engine, prompts=prompts, retrieve=retrieve, state=state)

        async def in_step(stages: Stages) -> WorkflowResult:
            async def retrieve_in_step(query: str, k: int) -> Sequence[Document]:
                await stages.reach()
                return await retrieve(query, k)

            staged = stages.engine(engine)
            return await interpret(
                graph, question, engine=staged, prompts=prompts, retrieve=retrieve_in_step, state=state
            )

        return await batches.run(in_step)

    return run


_SYSTEM_PROMPT_WORDS = 64
_PROMPT_TOKENS = 256
_UNBOUNDED = 1_000_000
_FACTS = (
    *("speculations", "right", "near_speculations", "near_right", "search_speculations", "search_right"),
    *("later_prompt_tokens", "later_cached_tokens", "declined"),
)


@dataclass(frozen=True, slots=True)
class Materials:
    """An `index` of the documents' vectors, whose nprobe is the cell's."""

    documents: Sequence[Document]
    index: Any
    embed: Embedder
    script: Script


async def serve(
    system: System, cell: WorkflowsCell, materials: Materials, at_s: Sequence[float], workflows: Sequence[str]
) -> Mapping[str, Any]:
    """`rows` and `facts` of requests that arrive at these times, each with its workflow. To be run on a virtual loop.

    Facts: seconds until all are answered, and those that engine and searches were busy; prompt tokens, and those of
    them that were computed; requests that the engine dropped; of speculative generations, those that ran and those that
    were right; of the generations after a request's first, prompt tokens and cached ones; with a fast tier, the
    share of codes scanned there.
    """
    loop = asyncio.get_running_loop()
    tokenizer, costs, search = WordTokenizer(), MODELS[cell.model], replace(SEARCH, busy_cores=cell.cores)
    engine = VirtualEngine[PromptRequest](
        costs, lambda request: materials.script.answer(tokenizer.words(request.token_ids or ()))
    )
    graphs = {name: compiled(name, cell.top_k) for name in dict.fromkeys(workflows)}
    tiers = _tiers(cell, search, materials) if system.fast else None
    prompts = ordered_prompts(tokenizer, costs.capacity_tokens, engine.cache)
    async with AsyncExitStack() as stack:
        if system.transformations is None:
            retrieve = _retrieve(system, search, materials)
            run = stage_by_stage(engine, RankedPrompts(prompts), retrieve, lockstep=system.lockstep)
        else:
            server = await stack.enter_async_context(
                WorkflowServer(
                    engine,
                    _search(materials.index, search, tiers),
                    materials.embed,
                    materials.documents.__getitem__,
                    prompts,
                    transformations=system.transformations(),
                    load=EngineLoad(prefill_batch(costs.token_budget, _PROMPT_TOKENS), clock=loop.time),
                    max_requests=_UNBOUNDED,
                    max_waiting=_UNBOUNDED,
                    # The paper's systems have no budget.
                    extra_tokens=None,
                    max_generations=system.max_generations,
                    window=system.window,
                    clock=loop.time,
                )
            )
            run = server.run
        graph_of = [graphs[workflow] for workflow in workflows]
        latency_s, speculations, total_s = await play(run, materials.script, graph_of, at_s)
    return {
        "rows": {"latency_s": latency_s, "workflow": list(workflows)},
        "facts": {
            "total_s": total_s - min(at_s),
            "engine_busy_s": engine.busy_s,
            "prompt_tokens": engine.prompt_tokens,
            "computed_tokens": engine.computed_tokens,
            "aborted": engine.aborted,
            **speculations,
            **({"fast_share": tiers.hit_share if tiers else 0.0} if cell.fast else {}),
        },
    }


def _retrieve(system: System, costs: SearchCosts, materials: Materials) -> Retrieve:
    search = WholeSearches(materials.index, costs, batched=system.searches != "alone", dealt=system.searches == "dealt")

    async def retrieve(query: str, k: int) -> list[Document]:
        ids = await search.search(materials.embed(query), k)
        return [materials.documents[int(id)] for id in ids if id >= 0]

    return retrieve


def _tiers(cell: WorkflowsCell, search: SearchCosts, materials: Materials) -> VirtualTiers | None:
    if not cell.fast:
        return None
    from ragorder.benchmarks.hedra.tiers.index_tiers import VirtualClusterScan, VirtualTiers
    from ragorder.benchmarks.hedra.tiers.torch_scan import TorchClusterScan

    index = materials.index
    costs = replace(FAST, code_s=1e-9 * cell.fast_ns)
    scan = VirtualClusterScan(TorchClusterScan(), costs, search.vectors_of(index))
    return VirtualTiers(scan, int(cell.fast * scan.bytes_of(index.ntotal, index.d)), cores=search.busy_cores)


def _search(index: Any, costs: SearchCosts, tiers: VirtualTiers | None) -> VirtualIVF:
    from ragorder.benchmarks.hedra.tiers.index_tiers import VirtualTieredIVF

    return VirtualIVF(index, costs) if tiers is None else VirtualTieredIVF(index, costs, tiers)


def ordered_prompts(
    tokenizer: WordTokenizer, capacity_tokens: int | None, cache: Any, learn: Callable[[int], None] | None = None
) -> WorkflowPrompts:
    """Return prompts ordered for a cache with blocks like those of `cache`."""
    builder = PromptBuilder(" ".join(["rule"] * _SYSTEM_PROMPT_WORDS), tokenizer=tokenizer)
    orderer = Orderer(
        tokens=builder.document_tokens,
        prefix_tokens=builder.prefix_tokens,
        capacity_tokens=capacity_tokens,
        block_size=cache.block_size,
    )
    return WorkflowPrompts(OrderedPrompts(orderer, builder, "token_ids", learn=learn))


async def play(
    run: Callable[..., Awaitable[WorkflowResult]],
    script: Script,
    graphs: Sequence[tuple[CompiledGraph, Mapping[str, Any]]],
    at_s: Sequence[float],
) -> tuple[list[float], dict[str, int], float]:
    """Ask each question at its time; return latencies, facts of the traces, and seconds until the last answer."""
    loop = asyncio.get_running_loop()
    latency_s, start_s = [0.0] * len(at_s), loop.time()
    traces: list[Any] = []

    async def ask(number: int) -> None:
        await asyncio.sleep(max(0.0, start_s + at_s[number] - loop.time()))
        graph, state = graphs[number]
        result = await run(graph, script.question(number), state=state)
        latency_s[number] = loop.time() - start_s - at_s[number]
        traces.append(result.trace)

    await asyncio.gather(*map(ask, range(len(at_s))))
    facts = _facts_of_traces([trace for trace in traces if trace is not None])
    return [round(each, 6) for each in latency_s], facts, loop.time() - start_s


def _facts_of_traces(traces: Sequence[Any]) -> dict[str, int]:
    """Return counts of speculative generations and searches, and of generations after each request's first."""
    facts = dict.fromkeys(_FACTS, 0)
    for trace in traces:
        generations = [piece for piece in trace.pieces if piece.worker == "engine"]
        ahead = [piece for piece in generations if piece.kind == "speculative" and piece.started_s is not None]
        searches = [piece for piece in trace.pieces if piece.worker == "search" and piece.kind == "speculative"]
        near = [piece for piece in ahead if piece.stages_ahead == 1]
        for name, pieces in (("", ahead), ("near_", near), ("search_", searches)):
            facts[f"{name}speculations"] += len(pieces)
            facts[f"{name}right"] += sum(piece.outcome == "used" for piece in pieces)
        facts["declined"] += trace.declined
        due = (piece for piece in generations if piece.kind == "due" and piece.prompt_tokens)
        used = sorted(due, key=lambda piece: piece.planned_s)
        for piece in used[1:]:
            facts["later_prompt_tokens"] += piece.prompt_tokens
            facts["later_cached_tokens"] += piece.cached_tokens or 0
    return facts
