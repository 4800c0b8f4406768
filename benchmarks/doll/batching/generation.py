"""RAGDoll's workers by hand: passes over partitions, sizes of batches, and generation."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ragorder import Orderer, Ordering
from ragorder.benchmarks.doll.batching.settings import PARTITIONS, Generator
from ragorder.document import Document
from ragorder.eval.data.corpora import Corpus
from ragorder.eval.engines.sim import SimEngine
from ragorder.pipelining.batching import Backlog, BacklogAware, PowerLaw
from ragorder.pipelining.reordering import CacheAwareQueue, CachedLengths


@dataclass(eq=False, slots=True)
class Served:
    """A request and its times, in seconds of the virtual clock."""

    number: int
    at_s: float
    search_s: float = 0.0
    found_s: float = 0.0
    begun_s: float = 0.0
    ended_s: float = 0.0

    @property
    def waiting_s(self) -> float:
        return self.search_s - self.at_s + self.begun_s - self.found_s


class Line:
    """First come, first served. `close`: no other will come."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: deque[Served] = deque()
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, *requests: Served) -> None:
        self._waiting.extend(requests)
        self._changed.set()

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    def take(self, count: int) -> list[Served]:
        return [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]

    async def changed(self) -> None:
        """Until a request comes, or the last one has come."""
        self._changed.clear()
        await self._changed.wait()

    async def any(self) -> bool:
        """Wait for one request; False: none will come."""
        while not self._waiting and not self.closed:
            await self.changed()
        return bool(self._waiting)


QUESTION_TOKENS = 32
ANSWER_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Prompts:
    """The documents of each request, by rank, and their tokens."""

    documents: Sequence[Sequence[Document]]
    first: dict[str, int]
    tokens: int

    @classmethod
    def of(cls, corpus: Corpus, count: int, *, top_k: int, seed: int) -> Prompts:
        """Of `count` questions, drawn without repetition while there are enough."""
        draw = random.Random(f"prompts {seed}")
        chosen: list[int] = []
        while len(chosen) < count:
            chosen += draw.sample(range(len(corpus.questions)), min(count - len(chosen), len(corpus.questions)))
        documents = [[corpus.documents[place] for place in corpus.rankings[each][:top_k]] for each in chosen]
        first: dict[str, int] = {}
        tokens = 0
        for document in (each for request in documents for each in request):
            if document.key not in first:
                first[document.key] = tokens
                tokens += document.token_count
        return cls(documents, first, tokens)

    @classmethod
    def none(cls, count: int) -> Prompts:
        """For systems that only count requests."""
        return cls([()] * count, {}, 0)

    @property
    def mean_tokens(self) -> float:
        """Of a prompt with its answer."""
        lengths = [sum(each.token_count for each in request) for request in self.documents]
        return sum(lengths) / len(lengths) + QUESTION_TOKENS + ANSWER_TOKENS

    def token_ids(self, number: int, documents: Sequence[Document]) -> list[int]:
        """Of the documents in this order, and of the question, which no other request has."""
        found: list[int] = []
        for document in documents:
            begin = self.first[document.key]
            found += range(begin, begin + document.token_count)
        begin = self.tokens + number * QUESTION_TOKENS
        return [*found, *range(begin, begin + QUESTION_TOKENS)]


class Passes:
    """Passes over all partitions; `resident` ones take no time, `slowed` is the factor while something else runs."""

    def __init__(self, load_s: float, resident: Callable[[], int], slowed: Callable[[], float]) -> None:
        self.busy_s = 0.0
        self._load_s = load_s
        self._resident = resident
        self._slowed = slowed
        # Of a pass without an end.
        self._place = 0

    async def search(self, batch: list[Served]) -> None:
        """One pass for a batch."""
        loop = asyncio.get_running_loop()
        for request in batch:
            request.search_s = loop.time()
        for _ in range(PARTITIONS - self._resident()):
            await self._load()
        for request in batch:
            request.found_s = loop.time()

    async def run(self, line: Line, found: Line) -> None:
        """A pass after another, each for all requests that wait."""
        while await line.any():
            batch = line.take(len(line))
            await self.search(batch)
            found.put(*batch)
        found.close()

    async def run_joined(self, line: Line, found: Line) -> None:
        """Requests join at the next partition, and have their results after all partitions, in any order."""
        loop = asyncio.get_running_loop()
        left: dict[Served, int] = {}
        while left or await line.any():
            for request in line.take(len(line)):
                request.search_s = loop.time()
                left[request] = PARTITIONS
            await self.advance()
            for request in list(left):
                left[request] -= 1
                if not left[request]:
                    del left[request]
                    request.found_s = loop.time()
                    found.put(request)
        found.close()

    async def advance(self) -> None:
        """The next partition, around and around."""
        if self._place >= self._resident():
            await self._load()
        self._place = (self._place + 1) % PARTITIONS

    async def _load(self) -> None:
        seconds = self._load_s * self._slowed()
        await asyncio.sleep(seconds)
        self.busy_s += seconds


SIZES = (8, 16, 32, 48, 64)


class Sizes(Protocol):
    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        """How many of the waiting requests to serve now; 0: wait for others, unless no other will come (`last`)."""

    def learn(self, size: int, seconds: float) -> None:
        """What a batch took."""


class FixedSizes:
    """Full batches of `size`."""

    def __init__(self, size: int) -> None:
        self.size = size

    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        if waiting < self.size and not last:
            return 0
        return min(waiting, self.size)

    def learn(self, size: int, seconds: float) -> None:
        pass


class RateSizes:
    """Full batches of four minutes' requests (RAGDoll section 6.1); `rate`: requests a minute at a time."""

    def __init__(self, rate: Callable[[float], float], most: int) -> None:
        self._rate = rate
        self._most = most

    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        size = min(self._most, max(1, round(4 * self._rate(now_s))))
        return FixedSizes(size).next(waiting, now_s, last=last)

    def learn(self, size: int, seconds: float) -> None:
        pass


class BacklogSizes:
    """The best size for what waits (RAGDoll Eq. 4 to 8), by times that are profiled first and learnt then."""

    def __init__(self, seconds: Callable[[int], float], most: int, sizes: Sequence[int] = SIZES) -> None:
        chosen = sorted({min(size, most) for size in sizes})
        # A law takes two sizes.
        profiled = chosen if len(chosen) > 1 else sorted({1, 2, *chosen})
        self.batcher = BacklogAware(PowerLaw.fit([(size, seconds(size)) for size in profiled]), sizes=chosen)

    def next(self, waiting: int, now_s: float, *, last: bool) -> int:
        return self.batcher.size(Backlog(waiting))

    def learn(self, size: int, seconds: float) -> None:
        self.batcher.learn(size, seconds)


class Moment(NamedTuple):
    """The beginning of a batch, or a step that requests join."""

    at_s: float
    batch: int
    waiting: int
    device_kv: float
    resident: int


class Batches:
    """Generates batches in `seconds` of their size; `moment`: share of KV on the device, and partitions."""

    def __init__(
        self, seconds: Callable[[int], float], sizes: Sizes, moment: Callable[[int], tuple[float, int]]
    ) -> None:
        self.busy_s = 0.0
        self.running = 0
        self.batch = 1
        self.trace: list[Moment] = []
        self._seconds = seconds
        self._sizes = sizes
        self._moment = moment

    async def generate(self, batch: list[Served], waiting: int) -> None:
        loop = asyncio.get_running_loop()
        self.running = self.batch = len(batch)
        self.trace.append(Moment(loop.time(), len(batch), waiting, *self._moment(len(batch))))
        seconds = self._seconds(len(batch))
        for request in batch:
            request.begun_s = loop.time()
        await asyncio.sleep(seconds)
        for request in batch:
            request.ended_s = loop.time()
        self.busy_s += seconds
        self.running = 0

    async def next_batch(self, line: Line) -> list[Served]:
        """Empty after the last one."""
        loop = asyncio.get_running_loop()
        while await line.any():
            batch = line.take(self._sizes.next(len(line), loop.time(), last=line.closed))
            if batch:
                return batch
            await line.changed()
        return []

    async def run(self, line: Line) -> None:
        while batch := await self.next_batch(line):
            began_s = asyncio.get_running_loop().time()
            await self.generate(batch, len(line))
            self.learn(len(batch), asyncio.get_running_loop().time() - began_s)

    def learn(self, size: int, seconds: float) -> None:
        self._sizes.learn(size, seconds)


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
    """An engine with a generator's costs, a step at a time; `kept`, or else `generator.most`, limits what runs."""

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
