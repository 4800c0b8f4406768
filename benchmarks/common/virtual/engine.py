"""Serving engine on a virtual clock: continuous batching, and the prefix cache of the simulated engine."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ragorder.benchmarks.common.virtual.costs import EngineCosts
from ragorder.eval.engines.sim import SimEngine
from ragorder.pipelining import AnswerChunk, Usage

# A leap that ends within this of a step's end has made the step.
_ROUNDING = 1e-6


class VirtualRequest(Protocol):
    @property
    def token_ids(self) -> Sequence[int] | None: ...


R = TypeVar("R", bound=VirtualRequest)


@dataclass(eq=False, slots=True)
class _Sequence:
    token_ids: Sequence[int]
    words: Sequence[str]
    chunks: asyncio.Queue[AnswerChunk] = field(default_factory=asyncio.Queue)
    handle: int | None = None
    cached_tokens: int = 0
    to_prefill: int = 0
    decoded: int = 0
    sent: int = 0
    aborted: bool = False

    @property
    def ended(self) -> bool:
        return self.aborted or self.decoded >= len(self.words)

    def decode(self, tokens: int, report_every: int) -> None:
        before, self.decoded = self.decoded, min(self.decoded + tokens, len(self.words))
        last = self.decoded == len(self.words)
        if not (before == 0 or last or self.decoded // report_every > before // report_every):
            return
        text = "".join(f"{word} " for word in self.words[self.sent : self.decoded])
        tokens, self.sent = self.decoded - self.sent, self.decoded
        usage = Usage(len(self.token_ids), self.cached_tokens, self.decoded, "stop") if last else None
        self.chunks.put_nowait(AnswerChunk(text, usage, tokens))

    def until_report(self, report_every: int) -> int:
        return min(len(self.words) - self.decoded, report_every - self.decoded % report_every)


class VirtualEngine(Generic[R]):
    """A `StreamingEngine` of requests with token ids. `answer` has the words that a request is answered with, a token
    each; chunks come with the first of them, after every `report_every` and with the last. Requests join and leave
    between two steps; prompts are prefilled in the order of arrival. `computed_tokens` of `prompt_tokens` were not
    cached; those of an aborted request count up to where its prompt was processed. `sent` counts requests."""

    def __init__(
        self,
        costs: EngineCosts,
        answer: Callable[[R], Sequence[str]],
        *,
        report_every: int = 16,
    ) -> None:
        self.costs = costs
        self.cache = SimEngine(capacity_tokens=costs.capacity_tokens, like="vllm-0.32")
        self.busy_s = 0.0
        self.steps = 0
        self.aborted = 0
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self.decoded_tokens = 0
        self.sent = 0
        self._answer = answer
        self._report_every = report_every
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._changed = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    @property
    def requests(self) -> int:
        return len(self._waiting) + len(self._running)

    async def stream(self, request: R, /) -> AsyncGenerator[AnswerChunk, None]:
        assert request.token_ids is not None, "a virtual engine takes token ids"
        sequence = _Sequence(request.token_ids, self._answer(request) or ("",))
        self._waiting.append(sequence)
        self.sent += 1
        self._changed.set()
        if self._stepping is None:
            self._stepping = asyncio.get_running_loop().create_task(self._run())
        try:
            while True:
                chunk = await sequence.chunks.get()
                yield chunk
                if chunk.usage is not None:
                    return
        finally:
            if not sequence.ended:
                sequence.aborted = True
                self.aborted += 1
                self._changed.set()

    async def _run(self) -> None:
        while self._join():
            started_s = asyncio.get_running_loop().time()
            await (self._prefill() if any(each.to_prefill for each in self._running) else self._decode())
            self.busy_s += asyncio.get_running_loop().time() - started_s
        self._stepping = None

    def _join(self) -> bool:
        for sequence in self._running:
            if sequence.ended:
                self._leave(sequence)
        self._running = [sequence for sequence in self._running if not sequence.ended]
        self._waiting = deque(sequence for sequence in self._waiting if not sequence.aborted)
        while self._waiting and len(self._running) < self.costs.max_requests:
            sequence = self._waiting[0]
            if self._running and not self.cache.has_room(sequence.token_ids, len(sequence.words)):
                break
            self._waiting.popleft()
            admitted, sequence.handle = self.cache.admit(sequence.token_ids, len(sequence.words))
            sequence.cached_tokens = admitted.cached_tokens
            sequence.to_prefill = len(sequence.token_ids) - sequence.cached_tokens
            self.prompt_tokens += len(sequence.token_ids)
            self._running.append(sequence)
        return bool(self._running)

    def _leave(self, sequence: _Sequence) -> None:
        """Of an aborted prompt the cache keeps what was computed; another that was to share the rest computes it."""
        assert sequence.handle is not None, "a sequence that has run has blocks"
        if not sequence.to_prefill:
            self.cache.finish(sequence.handle)
            return
        self.prompt_tokens -= sequence.to_prefill
        computed_tokens = len(sequence.token_ids) - sequence.to_prefill
        for other in self._running:
            if other is sequence or other.handle is None:
                continue
            shared = self.cache.common_blocks(sequence.handle, other.handle) - computed_tokens // self.cache.block_size
            if shared > 0:
                other.to_prefill += shared * self.cache.block_size
                other.cached_tokens -= shared * self.cache.block_size
                break
        self.cache.finish(sequence.handle, computed_tokens)

    async def _prefill(self) -> None:
        """One step: as many prompt tokens as its budget holds, and one token of each answer."""
        left = self.costs.token_budget
        decoding = [sequence for sequence in self._running if not sequence.to_prefill]
        parts = []
        for sequence in self._running:
            if sequence.to_prefill and left:
                parts.append((sequence, min(left, sequence.to_prefill)))
                left -= parts[-1][1]
        tokens = self.costs.token_budget - left
        self.steps += 1
        self.computed_tokens += tokens
        await asyncio.sleep(self.costs.seconds(tokens, _context(decoding), len(decoding)))
        for sequence, part in parts:
            sequence.to_prefill -= part
            if not sequence.to_prefill:
                decoding.append(sequence)
        self._take(decoding, 1)

    async def _decode(self) -> None:
        """Steps until an answer has a chunk, or a request comes or goes."""
        steps = min(sequence.until_report(self._report_every) for sequence in self._running)
        # The context at the middle of the leap.
        context = _context(self._running) + len(self._running) * steps // 2
        step_s = self.costs.seconds(0, context, len(self._running))
        steps = await self._leap(steps, step_s)
        self.steps += steps
        self._take(self._running, steps)

    async def _leap(self, steps: int, step_s: float) -> int:
        """Steps made until something changed, the one during which it changed included."""
        loop = asyncio.get_running_loop()
        self._changed.clear()
        start_s, timer = loop.time(), loop.call_later(steps * step_s, self._changed.set)
        await self._changed.wait()
        timer.cancel()
        made = min(steps, max(1, math.ceil((loop.time() - start_s) / step_s - _ROUNDING)))
        await asyncio.sleep(max(0.0, start_s + made * step_s - loop.time()))
        return made

    def _take(self, sequences: Sequence[_Sequence], tokens: int) -> None:
        for sequence in sequences:
            if not sequence.aborted:
                self.decoded_tokens += min(tokens, len(sequence.words) - sequence.decoded)
                sequence.decode(tokens, self._report_every)


def _context(sequences: Sequence[_Sequence]) -> int:
    return sum(len(sequence.token_ids) + sequence.decoded for sequence in sequences)
