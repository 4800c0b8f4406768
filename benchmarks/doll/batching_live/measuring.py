"""Requests served by one system in real time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median
from typing import Any

from ragorder import Orderer, Ordering, PromptBuilder
from ragorder.adapters.batching import ordered_batches
from ragorder.adapters.openai.prompts import OrderedPrompts, Question
from ragorder.benchmarks.doll.batching.serving import rates
from ragorder.benchmarks.doll.batching.sizes import RateSizes
from ragorder.benchmarks.doll.batching_live.parts import ANSWER_TOKENS, LiveParts
from ragorder.benchmarks.doll.batching_live.record import BatchingLiveCell
from ragorder.benchmarks.hedra.workflows.script import WordTokenizer
from ragorder.benchmarks.hedra.workflows_live.parts import ScriptedEngine
from ragorder.document import Document
from ragorder.pipelining.batching import BacklogAware, PartitionedRetrieval

__all__ = ["POLICIES", "serve_live"]

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
    """Static batches of four minutes' requests, of the paper's minutes: a batch is searched for, then generated, with
    documents by rank."""

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
