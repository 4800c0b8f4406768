"""A queue in front of an engine, served by one discipline or another: simulated, or on a server."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ragorder.document import Document
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import Cache, Completion
from ragorder.eval.engines.openai import OpenAIEngine, find_model
from ragorder.eval.engines.prompts import NumberedPrompts, Prompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.policies import make_orderer
from ragorder.ordering import Ordering
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter

__all__ = ["DISCIPLINES", "Discipline", "Outcome", "Serve", "on_a_server", "serve_live", "simulate"]

_OWN_CAPACITY_TOKENS = 16_000
_OWN_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Discipline:
    """How a queue is served: by which `window`, and for how many of those that wait each request is laid out."""

    name: str
    window: int
    waiting: int


DISCIPLINES = (
    Discipline("first come, first served", 0, 0),
    Discipline("the same, laid out for 8 waiting", 0, 8),
    Discipline("reordered", 32, 0),
    Discipline("reordered, laid out for 8 waiting", 32, 8),
)


@dataclass(slots=True)
class Outcome:
    """How a trace was served: the time to first token of each request from its arrival, in seconds, what the cache had,
    the time from the first arrival to the last token, and the most requests that overtook one."""

    ttft_s: list[float]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    total_s: float = 0.0
    largest_overtaking: int = 0

    @property
    def cached_ratio(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    def count(self, completion: Completion) -> None:
        self.prompt_tokens += completion.prompt_tokens
        self.cached_tokens += completion.cached_tokens


class _Queue:
    """The requests of a trace before they are sent, and the orderer that they share."""

    def __init__(self, trace: Trace, discipline: Discipline, engine: Cache, prompts: Prompts) -> None:
        lengths = {"tokens": prompts.document_tokens, "prefix_tokens": prompts.prefix_tokens}
        self.requests = trace.requests
        self.waiting: CacheAwareQueue[int] = CacheAwareQueue(discipline.window)
        self._orderer = make_orderer("auto", engine=engine, **lengths)
        self._foreseen = discipline.waiting
        self._prompts = prompts
        self._answer_tokens = engine.kept_output_tokens

    def lengths(self, number: int) -> Callable[[], CachedLengths]:
        request = self.requests[number]
        question_tokens = self._prompts.suffix_tokens(request)

        def lengths() -> CachedLengths:
            cached_tokens, end = self._orderer.predict_cached_tokens(request.documents)
            return CachedLengths(cached_tokens, end + question_tokens - cached_tokens)

        return lengths

    def order(self, number: int) -> Ordering[Document]:
        """The request is sent now."""
        request = self.requests[number]
        suffix_tokens = self._prompts.suffix_tokens(request) + self._answer_tokens
        waiting = [self.requests[other].documents for other in self.waiting.upcoming(self._foreseen)]
        return self._orderer.order(request.documents, waiting=waiting, suffix_tokens=suffix_tokens)

    def token_ids(self, number: int, ordering: Ordering[Document]) -> Sequence[int]:
        return self._prompts.token_ids(number, self.requests[number], ordering.documents)


def simulate(
    trace: Trace,
    at_s: Sequence[float],
    discipline: Discipline,
    *,
    capacity_tokens: int | None,
    max_in_flight: int,
    output_tokens: int = 1,
    times: ServiceTimes = ServiceTimes(),  # noqa: B008
) -> Outcome:
    """The requests arrive `at_s`, and at most `max_in_flight` are at the simulated engine, on a virtual clock: prompts
    are prefilled one after another, answers decoded side by side."""
    prompts = NumberedPrompts()
    engine = SimEngine(capacity_tokens=capacity_tokens, output_tokens=output_tokens)
    queue = _Queue(trace, discipline, engine, prompts)
    outcome = Outcome([math.nan] * len(at_s))
    clock = prefill_ends = 0.0
    running: list[tuple[float, int, int, Ordering[Document], Completion]] = []
    sent: deque[tuple[int, Ordering[Document]]] = deque()
    arrived = 0
    while arrived < len(at_s) or running:
        if arrived < len(at_s) and (not running or at_s[arrived] <= running[0][0]):
            clock = at_s[arrived]
            queue.waiting.enter(arrived, queue.lengths(arrived))
            arrived += 1
        else:
            clock, _, handle, ordering, completion = heapq.heappop(running)
            engine.finish(handle)
            ordering.confirm(completion.cached_tokens)
        while queue.waiting and len(running) + len(sent) < max_in_flight:
            number = queue.waiting.take().item
            sent.append((number, queue.order(number)))
        while sent:
            number, ordering = sent[0]
            token_ids = queue.token_ids(number, ordering)
            if running and not engine.has_room(token_ids):
                break
            sent.popleft()
            completion, handle = engine.admit(token_ids)
            uncached = completion.prompt_tokens - completion.cached_tokens
            prefill_ends = max(clock, prefill_ends) + uncached / times.prefill_tokens_per_s
            outcome.ttft_s[number] = prefill_ends - at_s[number]
            outcome.count(completion)
            ends = prefill_ends + output_tokens / times.decode_tokens_per_s
            heapq.heappush(running, (ends, number, handle, ordering, completion))
    outcome.total_s = clock
    outcome.largest_overtaking = queue.waiting.largest_overtaking
    return outcome


async def serve_live(
    trace: Trace,
    at_s: Sequence[float],
    discipline: Discipline,
    engine: OpenAIEngine,
    prompts: Prompts,
    *,
    max_in_flight: int,
) -> Outcome:
    """The same on a server, in real time, through a `ConcurrencyLimiter`. Raises RequestError if a request fails."""
    queue = _Queue(trace, discipline, engine, prompts)
    gate = ConcurrencyLimiter(max_in_flight, queue.waiting)
    outcome = Outcome([math.nan] * len(at_s))
    now = asyncio.get_running_loop().time
    start = now()

    async def serve(number: int) -> None:
        await asyncio.sleep(max(0.0, start + at_s[number] - now()))
        arrived_s = now()
        async with gate.slot(number, queue.lengths(number)):
            ordering = queue.order(number)
            waited_s = now() - arrived_s
            completion = await engine.complete(queue.token_ids(number, ordering))
            ordering.confirm(completion.cached_tokens)
        outcome.ttft_s[number] = waited_s + (completion.ttft_s or 0.0)
        outcome.count(completion)

    async with asyncio.TaskGroup() as group:
        for number in range(len(at_s)):
            group.create_task(serve(number))
    outcome.total_s = now() - start
    outcome.largest_overtaking = queue.waiting.largest_overtaking
    return outcome


Serve = Callable[[Trace, Sequence[float], Discipline], Outcome]
"""Serves a trace whose requests arrive at these times, in seconds."""


@contextmanager
def on_a_server(
    base_url: str | None,
    *,
    model: str | None = None,
    capacity_tokens: int | None = None,
    output_tokens: int = 1,
    max_in_flight: int = 4,
) -> Iterator[tuple[int | None, Serve]]:
    """The capacity in tokens of the server at `base_url`, or of a vLLM of its own with a cache of `capacity_tokens`,
    and what serves traces on it; each finds the cache as if it were empty.

    Raises EngineError for a server that cannot be measured, ImportError naming the extra to install.
    """
    from ragorder.adapters.vllm.cache_config import read_cache_config
    from ragorder.eval.engines.models import built_prompts, longest_prompt, random_model

    if base_url is None:
        folder = Path(model) if model else random_model()
        blocks = (capacity_tokens or _OWN_CAPACITY_TOKENS) // _OWN_BLOCK_SIZE
        longest = min(blocks * _OWN_BLOCK_SIZE, longest_prompt(folder))
        with VLLMServer(folder, blocks=blocks, block_size=_OWN_BLOCK_SIZE, max_model_len=longest) as own:
            shape = {"output_tokens": output_tokens, "max_in_flight": max_in_flight}
            with on_a_server(own.base_url, model=str(folder), **shape) as served:
                yield served
        return
    found = find_model(base_url)
    cache = read_cache_config(base_url)
    prompts = built_prompts(model or found.root)

    async def run(trace: Trace, at_s: Sequence[float], discipline: Discipline) -> Outcome:
        capacity, size = cache.capacity_tokens, cache.block_size
        engine = OpenAIEngine(
            base_url, found.id, block_size=size, capacity_tokens=capacity, output_tokens=output_tokens
        )
        async with engine:
            request = trace.requests[0]
            await engine.check(prompts.token_ids(0, request, request.documents))
            return await serve_live(trace, at_s, discipline, engine, prompts, max_in_flight=max_in_flight)

    yield cache.capacity_tokens, lambda trace, at_s, discipline: asyncio.run(run(trace, at_s, discipline))
