"""Queue disciplines in front of an engine, on a virtual clock or on a server."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ragorder import Lengths
from ragorder.document import Document
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import Cache, EngineCompletion, EngineError
from ragorder.eval.engines.openai import OpenAIEngine, find_model
from ragorder.eval.engines.prompts import NumberedPrompts, Prompts
from ragorder.eval.engines.server import VLLMServer
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.load import ServiceTimes
from ragorder.eval.running.policies import make_orderer
from ragorder.ordering import Ordering
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths, ConcurrencyLimiter

if TYPE_CHECKING:
    from ragorder.eval.running.options import Options

__all__ = [
    "DISCIPLINES",
    "Discipline",
    "LiveQueues",
    "QueueOutcome",
    "QueueServer",
    "SimulatedQueues",
    "VirtualQueues",
    "own_server",
]

_OWN_CAPACITY_TOKENS = 16_000
_OWN_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Discipline:
    """A reordering `window` (0: first come, first served); documents are arranged for so many `waiting` requests."""

    window: int
    waiting: int

    def within(self, window: int) -> Discipline:
        return Discipline(window if self.window else 0, self.waiting)


DISCIPLINES = {
    "fcfs": Discipline(0, 0),
    "fcfs+waiting": Discipline(0, 8),
    "reordered": Discipline(32, 0),
    "reordered+waiting": Discipline(32, 8),
}


class QueueOutcome:
    """Times to first token since arrival and between tokens (None where unknown), tokens, the time from the first
    arrival to the last token, and by how many later requests one was overtaken at most."""

    def __init__(self, requests: int) -> None:
        self.ttft_s = [math.nan] * requests
        self.tbt_s: list[float | None] = [None] * requests
        self.prompt_tokens = [0] * requests
        self.cached_tokens = [0] * requests
        self.total_s = 0.0
        self.largest_overtaking = 0

    def served(self, number: int, completion: EngineCompletion, ttft_s: float) -> None:
        self.ttft_s[number] = ttft_s
        self.prompt_tokens[number] = completion.prompt_tokens
        self.cached_tokens[number] = completion.cached_tokens


class QueueServer(Protocol):
    @property
    def engine(self) -> dict[str, Any]:
        """Its description in the results."""

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        """Serve a trace that arrives at these seconds, on an empty cache."""


class _Queue:
    def __init__(self, trace: Trace, discipline: Discipline, engine: Cache, prompts: Prompts) -> None:
        lengths = {"tokens": prompts.document_tokens, "prefix_tokens": prompts.prefix_tokens}
        self.requests = trace.requests
        self.waiting: CacheAwareQueue[int] = CacheAwareQueue(discipline.window)
        self._orderer = make_orderer("free", engine=engine, **lengths)
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
        request = self.requests[number]
        suffix_tokens = self._prompts.suffix_tokens(request) + self._answer_tokens
        waiting = [self.requests[other].documents for other in self.waiting.upcoming(self._foreseen)]
        return self._orderer.order(request.documents, waiting=waiting, lengths=Lengths(suffix=suffix_tokens))

    def token_ids(self, number: int, ordering: Ordering[Document]) -> Sequence[int]:
        return self._prompts.token_ids(number, self.requests[number], ordering.documents)


@dataclass(frozen=True, slots=True)
class VirtualQueues(QueueServer):
    """An engine in this process, on a virtual clock."""

    name: ClassVar[str]
    capacity_tokens: int | None
    max_in_flight: int
    output_tokens: int = 1
    times: ServiceTimes = field(default_factory=ServiceTimes)

    @property
    def engine(self) -> dict[str, Any]:
        return {"name": self.name, "capacity_tokens": self.capacity_tokens}


@dataclass(frozen=True, slots=True)
class SimulatedQueues(VirtualQueues):
    """The simulated engine: prefills one after another, decodes side by side."""

    name = "sim"

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        prompts = NumberedPrompts()
        engine = SimEngine(capacity_tokens=self.capacity_tokens, output_tokens=self.output_tokens)
        queue = _Queue(trace, discipline, engine, prompts)
        outcome = QueueOutcome(len(at_s))
        clock = prefill_ends = 0.0
        running: list[tuple[float, int, int, Ordering[Document], EngineCompletion]] = []
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
            while queue.waiting and len(running) + len(sent) < self.max_in_flight:
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
                prefill_ends = max(clock, prefill_ends) + uncached / self.times.prefill_tokens_per_s
                outcome.served(number, completion, prefill_ends - at_s[number])
                ends = prefill_ends + self.output_tokens / self.times.decode_tokens_per_s
                heapq.heappush(running, (ends, number, handle, ordering, completion))
        outcome.total_s = clock
        outcome.largest_overtaking = queue.waiting.largest_overtaking
        return outcome


class LiveQueues:
    """The server at `base_url`, in real time; each trace has a cache salt of its own.

    Raises EngineError for a server that cannot be measured, ImportError naming the extra to install.
    """

    def __init__(self, base_url: str, max_in_flight: int, output_tokens: int, options: Options) -> None:
        from ragorder.adapters.vllm.cache_config import ServerError, read_cache_config
        from ragorder.eval.engines.models import built_prompts

        found = find_model(base_url, options.served_model, api_key=options.api_key)
        try:
            cache = read_cache_config(base_url, api_key=options.api_key)
        except ServerError as error:
            raise EngineError(str(error)) from None
        self._model = str(options.model or found.root)
        self._prompts = built_prompts(self._model)
        self._max_in_flight = max_in_flight
        self._cache: dict[str, Any] = {"block_size": cache.block_size, "capacity_tokens": cache.capacity_tokens}
        self._connect = partial(
            OpenAIEngine, base_url, found.id, output_tokens=output_tokens, api_key=options.api_key, **self._cache
        )

    @property
    def engine(self) -> dict[str, Any]:
        return {"name": "openai", "model": self._model, **self._cache}

    def serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        return asyncio.run(self._serve(trace, at_s, discipline))

    async def _serve(self, trace: Trace, at_s: Sequence[float], discipline: Discipline) -> QueueOutcome:
        outcome = QueueOutcome(len(at_s))
        now = asyncio.get_running_loop().time
        async with self._connect() as engine:
            first = trace.requests[0]
            await engine.check(self._prompts.token_ids(0, first, first.documents))
            queue = _Queue(trace, discipline, engine, self._prompts)
            limiter = ConcurrencyLimiter(self._max_in_flight, queue.waiting)
            start = now()

            async def serve(number: int) -> None:
                await asyncio.sleep(max(0.0, start + at_s[number] - now()))
                arrived_s = now()
                async with limiter.slot(number, queue.lengths(number)):
                    ordering = queue.order(number)
                    waited_s = now() - arrived_s
                    completion = await engine.complete(queue.token_ids(number, ordering))
                    ordering.confirm(completion.cached_tokens)
                outcome.served(number, completion, waited_s + (completion.ttft_s or 0.0))
                outcome.tbt_s[number] = completion.tbt_s

            async with asyncio.TaskGroup() as group:
                for number in range(len(at_s)):
                    group.create_task(serve(number))
            outcome.total_s = now() - start
        outcome.largest_overtaking = queue.waiting.largest_overtaking
        return outcome


def own_server(model: Path | None, capacity_tokens: int | None) -> VLLMServer:
    """A vLLM server to be entered; without a `model`, with random weights."""
    from ragorder.eval.engines.models import longest_prompt, random_model

    model = model or random_model()
    blocks = (capacity_tokens or _OWN_CAPACITY_TOKENS) // _OWN_BLOCK_SIZE
    longest = min(blocks * _OWN_BLOCK_SIZE, longest_prompt(model))
    return VLLMServer(model, blocks=blocks, block_size=_OWN_BLOCK_SIZE, max_model_len=longest)
