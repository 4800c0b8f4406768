"""Generation that requests join and leave at each step, with the KV of a prefix kept once for all that share it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from ragorder import Orderer, Ordering
from ragorder.benchmarks.doll.batching.generation import Moment
from ragorder.benchmarks.doll.batching.line import Line, Served
from ragorder.benchmarks.doll.batching.prompts import ANSWER_TOKENS, QUESTION_TOKENS, Prompts
from ragorder.benchmarks.doll.batching.settings import Generator
from ragorder.document import Document
from ragorder.eval.engines.sim import SimEngine
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths

__all__ = ["Joining", "KeptKV"]

_BLOCK = 16


class KeptKV:
    """KV of prompts in blocks, documents in the order of the cache, or of their rank (`ordered=False`)."""

    def __init__(self, prompts: Prompts, capacity_tokens: int, *, ordered: bool) -> None:
        self.prompts = prompts
        self.prompt_tokens = 0
        self.computed_tokens = 0
        self._cache = SimEngine(block_size=_BLOCK, capacity_tokens=capacity_tokens, like="vllm-0.32")
        self._orderer = (
            Orderer(
                capacity_tokens=capacity_tokens,
                block_size=_BLOCK,
                partial_blocks_first=self._cache.partial_blocks_first,
                suffix_tokens=QUESTION_TOKENS + ANSWER_TOKENS,
            )
            if ordered
            else None
        )

    def lengths(self, number: int) -> CachedLengths:
        documents = self.prompts.documents[number]
        if self._orderer is None:
            # First come, first served.
            return CachedLengths(0, 1)
        cached, total = self._orderer.predict_cached_tokens(documents)
        return CachedLengths(cached, total - cached + QUESTION_TOKENS)

    def order(self, number: int, waiting: list[int]) -> _Prompt:
        documents = self.prompts.documents[number]
        if self._orderer is None:
            return _Prompt(self.prompts.token_ids(number, documents), None)
        backlog = [self.prompts.documents[each] for each in waiting]
        ordering = self._orderer.order(documents, waiting=backlog)
        return _Prompt(self.prompts.token_ids(number, ordering.documents), ordering)

    def has_room(self, prompt: _Prompt) -> bool:
        return self._cache.has_room(prompt.token_ids, ANSWER_TOKENS)

    def begin(self, prompt: _Prompt) -> int:
        """Tokens to compute."""
        admitted, prompt.handle = self._cache.admit(prompt.token_ids, ANSWER_TOKENS)
        prompt.cached_tokens = admitted.cached_tokens
        computed = len(prompt.token_ids) - admitted.cached_tokens
        self.prompt_tokens += len(prompt.token_ids)
        self.computed_tokens += computed
        return computed

    def end(self, prompt: _Prompt) -> None:
        self._cache.finish(prompt.handle)
        if prompt.ordering is not None:
            # The cache has ANSWER_TOKENS of it: an answer's last token is never computed on.
            prompt.ordering.confirm(prompt.cached_tokens, len(prompt.token_ids) + ANSWER_TOKENS + 1)


@dataclass(slots=True)
class _Prompt:
    token_ids: list[int]
    ordering: Ordering[Document] | None
    handle: int = 0
    cached_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Running:
    request: Served
    prompt: _Prompt | None
    left: int = ANSWER_TOKENS


class Joining:
    """An engine with the costs of a `generator`, a step at a time: each streams the weights once, whatever runs. As
    many run as there is room for in `kept`, or `generator.most` without it."""

    def __init__(
        self, generator: Generator, kept: KeptKV | None, moment: Callable[[int], tuple[float, int]], request_s: float
    ) -> None:
        self.busy_s = 0.0
        self.batch = 1
        self.trace: list[Moment] = []
        self._generator = generator
        self._kept = kept
        self._moment = moment
        self._request_s = request_s
        self._running: list[_Running] = []
        self._waiting: CacheAwareQueue[Served] = CacheAwareQueue()
        self._next: _Running | None = None

    @property
    def running(self) -> int:
        return len(self._running)

    async def run(self, line: Line) -> None:
        loop = asyncio.get_running_loop()
        while True:
            for request in line.take(len(line)):
                self._waiting.enter(request, None if self._kept is None else self._lengths(request.number))
            computed = self._join(loop.time())
            if not self._running:
                if not await line.any():
                    return
                continue
            seconds = self._generator.base_s / ANSWER_TOKENS + self._request_s * computed
            await asyncio.sleep(seconds)
            self.busy_s += seconds
            for each in self._running:
                each.left -= 1
                if not each.left:
                    each.request.ended_s = loop.time()
                    if self._kept is not None and each.prompt is not None:
                        self._kept.end(each.prompt)
            self._running = [each for each in self._running if each.left]

    def _lengths(self, number: int) -> Callable[[], CachedLengths]:
        kept = self._kept
        assert kept is not None
        return lambda: kept.lengths(number)

    def _join(self, now_s: float) -> float:
        """Requests that are computed in this step, counted as whole prompts."""
        computed = 0.0
        joined = False
        while self._next is not None or self._waiting:
            if self._next is None:
                self._next = self._chosen()
            if not self._has_room(self._next):
                break
            each, self._next = self._next, None
            each.request.begun_s = now_s
            if self._kept is None or each.prompt is None:
                computed += 1
            else:
                computed += self._kept.begin(each.prompt) / self._kept.prompts.mean_tokens
            self._running.append(each)
            joined = True
        if joined:
            self.batch = len(self._running)
            waiting = len(self._waiting) + (self._next is not None)
            self.trace.append(Moment(now_s, self.batch, waiting, *self._moment(self.batch)))
        return computed

    def _chosen(self) -> _Running:
        request = self._waiting.take().item
        if self._kept is None:
            return _Running(request, None)
        waiting = [each.number for each in self._waiting.upcoming(self._waiting.window)]
        return _Running(request, self._kept.order(request.number, waiting))

    def _has_room(self, each: _Running) -> bool:
        if not self._running:
            return True
        if self._kept is None or each.prompt is None:
            return len(self._running) < self._generator.most
        return self._kept.has_room(each.prompt)
