"""Requests served in real time: in serial batches, or decoupled with a placement that follows them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ragorder import Orderer, Ordering
from ragorder.adapters.batching import BatchingMetrics, ordered_batches
from ragorder.adapters.embedded import EmbeddedStreams
from ragorder.adapters.embedded.load import LoadFollower
from ragorder.adapters.openai.prompts import OrderedPrompts, Question
from ragorder.benchmarks.doll.batching_live.cells import POLICIES, LiveSystem
from ragorder.benchmarks.doll.batching_live.parts import (
    ANSWER_TOKENS,
    PARTITIONS,
    UNBOUNDED,
    LiveParts,
    LiveRetrieval,
    SlowSearch,
    TimedEngine,
)
from ragorder.document import Document
from ragorder.eval.data.arrivals import ArrivalStep
from ragorder.pipelining.batching import BacklogAware, DecoupledServer, RequestTrace
from ragorder.pipelining.placement.plan import plan_placement
from ragorder.pipelining.placement.replan import Replanner

COLUMNS = ("latency_s", "at_s", "waiting_s", "retrieval_s", "generation_s")


_BY_RANK: Mapping[str, Any] = {"moves": "prefix", "best": "any", "max_displacement": 0}
_WINDOW = 32
_SAMPLE_S = 0.25

Row = tuple[float, float, float]
"""Seconds of waiting, retrieval and generation."""
Run = Callable[[Question], Awaitable[Row]]


@dataclass(slots=True)
class _Tokens:
    """Of all prompts, and those that the engine had."""

    prompt: int = 0
    cached: int = 0


async def serve_live(policy: str, parts: LiveParts, at_s: Sequence[float]) -> Mapping[str, Any]:
    """`rows` and `facts` of requests that arrive at these times."""
    system, cell = POLICIES[policy], parts.cell
    placement = parts.serial if system.serial else plan_placement(parts.budgets, parts.costs, backlog=cell.most)
    with parts.search() as search, parts.engine(placement, search, system.slots) as (worker, engine):
        served = _Served(parts, engine, search, parts.retrieval(search), EmbeddedStreams(worker))
        # The first step of a process prepares kernels; its question is not asked again.
        await served.generate(parts.question(0), [Document("warm-up", parts.documents[0].text)])
        engine.times.clear()
        served.tokens, passes = _Tokens(), engine.passes
        served.start_s = start_s = time.perf_counter()
        rows: dict[int, tuple[float, Row]] = {}

        async def ask(number: int, run: Run) -> None:
            await asyncio.sleep(max(0.0, start_s + at_s[number] - time.perf_counter()))
            found = await run(parts.question(number))
            rows[number] = time.perf_counter() - start_s - at_s[number], found

        running = _serial(served, placement.batch, len(at_s)) if system.serial else _decoupled(served, system)
        async with running as run:
            await asyncio.gather(*(ask(number, run) for number in range(len(at_s))))
            total_s = time.perf_counter() - start_s
        facts = {
            "total_s": total_s,
            "prompt_tokens": served.tokens.prompt,
            "cached_tokens": served.tokens.cached,
            # Of all layers, in each step.
            "streamed": (engine.passes - passes) / max(1, len(engine.times)),
            "pass_s": search.reading_s * search.pass_bytes / max(1, search.read_bytes),
            "step_s": _median(seconds for seconds, beside in engine.times if not beside),
            "beside_s": _median(seconds for seconds, beside in engine.times if beside),
            "moves": served.moves,
            "recall": parts.recall,
            "trace": served.moments,
        }
    lines = [(latency_s, at_s[number], *row) for number, (latency_s, row) in sorted(rows.items())]
    columns = ([round(each, 4) for each in column] for column in zip(*lines, strict=True))
    return {"rows": dict(zip(COLUMNS, columns, strict=True)), "facts": facts}


def _median(seconds: Iterable[float]) -> float | None:
    found = list(seconds)
    return median(found) if found else None


@dataclass(slots=True)
class _Served:
    """One run: its parts, and what it counts. `moments`: the state of both queues and of the placement over time."""

    parts: LiveParts
    engine: TimedEngine
    search: SlowSearch
    retrieval: LiveRetrieval
    streams: EmbeddedStreams
    tokens: _Tokens = field(default_factory=_Tokens)
    start_s: float = 0.0
    moves: int = 0
    moments: list[dict[str, float]] = field(default_factory=list)

    def orderer(self, *, ordered: bool) -> Orderer:
        builder = self.parts.builder
        return Orderer(
            tokens=builder.document_tokens,
            prefix_tokens=builder.prefix_tokens,
            capacity_tokens=self.engine.device_tokens,
            block_size=self.engine.block_size,
            suffix_tokens=ANSWER_TOKENS + 16,
            **({} if ordered else _BY_RANK),
        )

    async def generate(self, question: Question, documents: Sequence[Document]) -> None:
        """Answer from documents by rank."""
        prompts = OrderedPrompts(self.orderer(ordered=False), self.parts.builder, "token_ids")
        ordering = Ordering(list(documents), list(range(len(documents))))
        request = prompts.request(question.query, ordering, None, question.all_options())
        async with aclosing(self.streams.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.usage is not None:
                    self.count(chunk.usage.prompt_tokens, chunk.usage.cached_tokens)

    def count(self, prompt: int | None, cached: int | None) -> None:
        self.tokens.prompt += prompt or 0
        self.tokens.cached += cached or 0

    def look(self, server: DecoupledServer[Any, Any, Any], placed: Any) -> None:
        stream, kv = self.engine.streamer.stats, [each.kv_tokens for each in server.trace if each.kv_tokens is not None]
        moment = {
            "at_s": time.perf_counter() - self.start_s,
            "searched": len(server.retrieving.running),
            "running": len(server.generating.running),
            "waiting": server.generating.waiting,
            "most": server.generating.most or 0,
            "kv_tokens": kv[-1] if kv else 0,
            "kv_room": self.engine.device_tokens,
            "partitions": len(self.search.held) * PARTITIONS / self.search.partitions,
            "device": stream.device_layers,
            "host": stream.host_layers,
            "disk": stream.disk_layers,
        }
        if hasattr(placed, "kv_host_share"):
            moment["kv_host"] = 100 * placed.kv_host_share
        self.moments.append({name: round(value, 4) for name, value in moment.items()})


@asynccontextmanager
async def _decoupled(served: _Served, system: LiveSystem) -> AsyncIterator[Run]:
    """The product's server, with a placement that follows the load, as `ragorder engine --corpus` has them."""
    parts, engine = served.parts, served.engine
    first = plan_placement(parts.budgets, parts.costs, backlog=parts.cell.most)
    replanner, metrics = Replanner(first, parts.costs, most=parts.cell.most), BatchingMetrics()
    follower = LoadFollower(replanner, metrics, lambda placed: f"a batch of {placed.batch}")
    server = ordered_batches(
        served.streams,
        served.retrieval,
        orderer=served.orderer(ordered=system.ordered),
        builder=parts.builder,
        prompts="token_ids",
        observers=[metrics, follower],
        batching=BacklogAware(most=parts.cell.most),
        window=_WINDOW if system.ordered else 0,
        kv_limit=engine.device_tokens,
        placement=first,
        max_requests=UNBOUNDED,
        max_contexts=UNBOUNDED,
    )
    follower.follow(server)

    async def run(question: Question) -> Row:
        trace = (await server.run(question)).trace
        served.count(trace.prompt_tokens, trace.cached_tokens)
        return _parts_of(trace)

    async def watch() -> None:
        while True:
            served.look(server, replanner.placed)
            await asyncio.sleep(_SAMPLE_S)

    async with server:
        watching = asyncio.create_task(watch())
        try:
            yield run
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
            await follower.close()
            moved = metrics.registry.get_sample_value("ragorder_batching_placements_total", {"outcome": "moved"})
            served.moves = int(moved or 0)


def _parts_of(trace: RequestTrace) -> Row:
    began_s, found_s, sent_s, ended_s = (
        trace.retrieval_began_s,
        trace.found_s,
        trace.generation_began_s,
        trace.ended_s,
    )
    assert began_s is not None and found_s is not None and sent_s is not None and ended_s is not None
    return began_s - trace.arrived_s + sent_s - found_s, found_s - began_s, ended_s - sent_s


@dataclass(eq=False, slots=True)
class _Task:
    """A `SearchTask`, whose times are set in `ended`."""

    question: Question
    arrived_s: float
    ended: asyncio.Future[Row]
    checkpoint: Any = None
    cancel_search: Callable[[], object] | None = None
    abandoned: bool = False


@asynccontextmanager
async def _serial(served: _Served, most: int, expected: int) -> AsyncIterator[Run]:
    """Static batches of four minutes' requests, at most `most`: searched for, then generated, by rank."""
    cell, waiting = served.parts.cell, deque[_Task]()
    steps = cell.arrivals.steps
    serving: asyncio.Task[None] | None = None

    async def serve() -> None:
        while waiting:
            now_s = cell.scale * (time.perf_counter() - served.start_s)
            size = serial_size(len(waiting), rate_at(steps, now_s), most, last=not expected)
            if not size:
                return
            await _serve_batch(served, [waiting.popleft() for _ in range(size)])

    async def run(question: Question) -> Row:
        nonlocal serving, expected
        task = _Task(question, time.perf_counter(), asyncio.get_running_loop().create_future())
        waiting.append(task)
        expected -= 1
        if serving is None or serving.done():
            serving = asyncio.create_task(serve())
        return await task.ended

    yield run


def rate_at(steps: Sequence[ArrivalStep], now_s: float) -> float:
    """Requests a minute at a time; after the last step as in it."""
    for step in steps:
        now_s -= step.seconds
        if now_s < 0:
            break
    return 60 * step.requests / step.seconds


def serial_size(waiting: int, rate: float, most: int, *, last: bool) -> int:
    """How many of the waiting requests are the next batch: four minutes' requests (RAGDoll section 6.1), at most
    `most`. 0: wait for others, unless no other will come (`last`)."""
    size = min(most, max(1, round(4 * rate)))
    return min(waiting, size) if last or waiting >= size else 0


async def _serve_batch(served: _Served, batch: Sequence[_Task]) -> None:
    began_s = time.perf_counter()
    documents: dict[int, Sequence[Document]] = {}
    async with aclosing(served.retrieval.search_batch(batch)) as results:
        async for place, found in results:
            if isinstance(found, Exception):
                raise found
            documents[place] = found
    sent_s = time.perf_counter()
    await asyncio.gather(*(served.generate(batch[place].question, found) for place, found in documents.items()))
    for task in batch:
        task.ended.set_result((began_s - task.arrived_s, sent_s - began_s, time.perf_counter() - sent_s))
