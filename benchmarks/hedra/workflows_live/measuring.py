"""Workflows served by one system in real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from ragorder import Orderer
from ragorder.adapters.openai.pipelined import PromptLoad, WatchedEngine
from ragorder.adapters.openai.prompts import OrderedPrompts
from ragorder.adapters.workflows import WorkflowPrompts
from ragorder.benchmarks.hedra.workflows.costs import SYSTEM_PROMPT_WORDS
from ragorder.benchmarks.hedra.workflows.embedder import Embedder
from ragorder.benchmarks.hedra.workflows.lockstep import stage_by_stage
from ragorder.benchmarks.hedra.workflows.measuring import facts_of_traces
from ragorder.benchmarks.hedra.workflows.prompts import RankedPrompts
from ragorder.benchmarks.hedra.workflows.script import Script, WordTokenizer, compiled
from ragorder.benchmarks.hedra.workflows.systems import System
from ragorder.benchmarks.hedra.workflows_live.engines import CAPACITY_TOKENS, LiveEngine
from ragorder.benchmarks.hedra.workflows_live.parts import BatchedSearch, ScriptedEngine
from ragorder.document import Document
from ragorder.pipelining import ContinuousIVF
from ragorder.pipelining.workflow import WorkflowServer
from ragorder.prompt import PromptBuilder

__all__ = ["LiveMaterials", "serve_live"]

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
    """`rows` and `facts` of requests that arrive at these times. Each system begins with an empty cache, and embeds
    every query again."""
    tokenizer = WordTokenizer()
    builder = PromptBuilder(" ".join(["rule"] * SYSTEM_PROMPT_WORDS), tokenizer=tokenizer)
    graph, state = compiled(workflow, top_k)
    latency_s = [0.0] * len(at_s)
    traces: list[Any] = []

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
                vector = await asyncio.to_thread(materials.embed.anew, query)
                return [document(id) for id in await searches.search(vector, k) if id >= 0]

            run: Any = stage_by_stage(
                engine, RankedPrompts(_prompts(builder, materials.engine)), retrieve, lockstep=system.lockstep
            )
        else:
            search = stack.enter_context(ContinuousIVF(materials.index, cores=1))
            load = PromptLoad(WatchedEngine(engine), token_budget=materials.engine.token_budget)
            server = WorkflowServer(
                engine,
                search,
                materials.embed.anew,
                document,
                _prompts(builder, materials.engine, load.learn),
                transformations=system.transformations(),
                load=load,
                max_requests=_UNBOUNDED,
                max_waiting=_UNBOUNDED,
            )
            run = (await stack.enter_async_context(server)).run

        start_s = time.perf_counter()

        async def ask(number: int) -> None:
            await asyncio.sleep(max(0.0, start_s + at_s[number] - time.perf_counter()))
            result = await run(graph, materials.script.question(number), state=state)
            latency_s[number] = time.perf_counter() - start_s - at_s[number]
            traces.append(result.trace)

        await asyncio.gather(*map(ask, range(len(at_s))))
        total_s = time.perf_counter() - start_s
    return {
        "rows": {"latency_s": [round(each, 6) for each in latency_s]},
        "facts": {
            "total_s": total_s,
            "prompt_tokens": engine.prompt_tokens,
            "cached_tokens": engine.cached_tokens,
            "generation_ms": 1e3 * engine.generation_s / max(1, engine.generations),
            **facts_of_traces([trace for trace in traces if trace is not None]),
        },
    }


def _prompts(builder: PromptBuilder, engine: LiveEngine, learn: Callable[[int], None] | None = None) -> WorkflowPrompts:
    orderer = Orderer(
        tokens=builder.document_tokens,
        prefix_tokens=builder.prefix_tokens,
        capacity_tokens=CAPACITY_TOKENS,
        block_size=engine.block_size,
        partial_blocks_first=engine.partial_blocks_first,
    )
    return WorkflowPrompts(OrderedPrompts(orderer, builder, "token_ids", learn=learn))
