"""Questions answered by one system in real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from ragorder import Orderer, PromptBuilder
from ragorder.adapters.embedded import EmbeddedStreams, EngineWorker
from ragorder.adapters.openai.prompts import OrderedPrompts
from ragorder.adapters.workflows import WorkflowPrompts
from ragorder.document import Document
from ragorder.eval.experiments.all_three.model import NumberTokenizer
from ragorder.eval.experiments.all_three.questions import TwoHopQuestions, two_hops
from ragorder.eval.experiments.all_three.record import AllThreeCell
from ragorder.eval.experiments.all_three.systems import System
from ragorder.eval.experiments.fusion.task import BOS
from ragorder.eval.experiments.streaming.source import ThrottledSource
from ragorder.eval.experiments.workflows.lockstep import stage_by_stage
from ragorder.eval.experiments.workflows.prompts import RankedPrompts
from ragorder.kernels.engine import EngineSettings, TieredEngine
from ragorder.kernels.engine.budgeted import load_streamed
from ragorder.kernels.engine.loading import load_tokenizer
from ragorder.pipelining import ContinuousIVF, EngineLoad, prefill_batch
from ragorder.pipelining.search.scanner import one_thread
from ragorder.pipelining.workflow import WorkflowServer

__all__ = ["serve"]

_DEVICE_TOKENS = 4_096
_STEP_TOKENS = 512
# Of requests that one step has logits of: a vocabulary of pairs makes these the largest part of a small step.
_MOST_REQUESTS = 16
_DOCUMENT_TOKENS = 18
_PROFILE_S = 1.0
_UNBOUNDED = 1_000_000


async def serve(
    system: System, cell: AllThreeCell, folder: Path, questions: TwoHopQuestions, index: Any, at_s: Sequence[float]
) -> Mapping[str, Any]:
    """`rows` and `facts` of requests that arrive at these times, with an empty cache at first."""
    engine = _engine(system, cell, folder)
    builder = PromptBuilder(
        str(BOS), document_template="{text} ", question_template="{query}", tokenizer=NumberTokenizer()
    )
    orderer = Orderer(
        tokens=builder.document_tokens,
        prefix_tokens=builder.prefix_tokens,
        capacity_tokens=engine.device_tokens,
        block_size=engine.settings.block_size,
        reuse="fused" if system.copies else "exact",
        recompute=cell.recompute,
    )
    prompts: Any = WorkflowPrompts(OrderedPrompts(orderer, builder, "token_ids"))
    if not system.ordered:
        prompts = RankedPrompts(prompts)
    worker = EngineWorker(engine)
    streams = EmbeddedStreams(worker)
    graph = two_hops(cell.top_k)
    latency_s, right = [0.0] * len(at_s), [0.0] * len(at_s)

    def document(number: int) -> Document:
        return questions.documents[number]

    async with AsyncExitStack() as stack:
        stack.callback(worker.close)
        if system.workflows:
            search = stack.enter_context(ContinuousIVF(index, cores=1))
            server = WorkflowServer(
                streams,
                search,
                questions.embed,
                document,
                prompts,
                load=EngineLoad(prefill_batch(_STEP_TOKENS, _DOCUMENT_TOKENS * cell.top_k)),
                max_requests=_UNBOUNDED,
                max_waiting=_UNBOUNDED,
            )
            run: Any = (await stack.enter_async_context(server)).run
        else:

            async def retrieve(query: str, k: int) -> list[Document]:
                vector = questions.embed(query)[None]
                found = (await asyncio.to_thread(_search, index, vector, k))[0]
                return [document(number) for number in found if number >= 0]

            run = stage_by_stage(streams, prompts, retrieve)
        start_s = time.perf_counter()

        async def ask(number: int) -> None:
            await asyncio.sleep(max(0.0, start_s + at_s[number] - time.perf_counter()))
            result = await run(graph, str(questions.names[number]), state={})
            latency_s[number] = time.perf_counter() - start_s - at_s[number]
            right[number] = float(result.text.strip() == str(questions.values[number]))

        await asyncio.gather(*map(ask, range(len(at_s))))
        total_s = time.perf_counter() - start_s
        stats = engine.stats()
        facts = {
            "total_s": total_s,
            "prompt_tokens": stats.prompt_tokens,
            "exact_tokens": stats.cached.total,
            "copied_tokens": stats.fused.total,
            "recomputed_tokens": stats.recomputed,
            "computed_tokens": stats.computed_tokens,
            "steps": stats.steps,
            "streamed_bytes": 0 if stats.stream is None else stats.stream.bytes,
        }
    return {"rows": {"latency_s": [round(each, 6) for each in latency_s], "right": right}, "facts": facts}


def _engine(system: System, cell: AllThreeCell, folder: Path) -> TieredEngine:
    settings = EngineSettings(
        device="cpu",
        device_bytes=cell.device_bytes if system.streamed else None,
        # On a CPU layers in host memory would be computed where they lie.
        host_bytes=0,
        device_tokens=_DEVICE_TOKENS,
        max_batch_tokens=_STEP_TOKENS,
        max_requests=_MOST_REQUESTS,
        replicate_nodes=0,
        reuse="fused" if system.copies else "exact",
        recompute=cell.recompute,
        profile_budget_s=_PROFILE_S,
    )
    if not system.streamed:
        return TieredEngine.load(folder, settings)
    streamed = load_streamed(folder, settings, source=lambda given: ThrottledSource(given, cell.bytes_per_s, 0.0, 0))
    return TieredEngine(streamed, load_tokenizer(folder), settings)


def _search(index: Any, vector: Any, k: int) -> list[list[int]]:
    with one_thread():
        found: list[list[int]] = index.search(vector, k)[1].tolist()
    return found
