"""Drivers: runs served in turn, or under load on a virtual or the real clock.

Drivers that need no real time are generators, which yield after each request sent, so that runs can take turns.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

from ragorder.eval.data.arrivals import Arrival
from ragorder.eval.engines.base import AsyncEngine, Engine, EngineCompletion, RequestError
from ragorder.eval.running.runner import Run, Sent

Advance = Callable[[], None]
Progress = Callable[[str, int], Advance]
"""Announces work and the number of its steps; the result is called after each step."""


def silent(description: str, steps: int) -> Advance:
    return lambda: None


@dataclass(frozen=True)
class ServiceTimes:
    """A model of the simulated engine's speed under load, about that of an 8B model on one GPU: prompts are prefilled
    one after another, answers decoded side by side. Raises ValueError for a rate that is not positive."""

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 50.0

    def __post_init__(self) -> None:
        if not (self.prefill_tokens_per_s > 0 and self.decode_tokens_per_s > 0):
            raise ValueError("tokens are prefilled and decoded at positive rates: raise --prefill-rate, --decode-rate")


@dataclass(frozen=True)
class Load:
    """An open loop of `arrivals`, or a closed loop; `concurrency` bounds the requests in flight, and an arrival beyond
    it waits. Answer lengths are `output_tokens`, or else the arrivals', or the engine's."""

    concurrency: int | None = None
    arrivals: Sequence[Arrival] = ()
    output_tokens: int | None = None

    def at_s(self, row: int) -> float:
        return self.arrivals[row].at_s if self.arrivals else 0.0

    def length(self, row: int) -> int | None:
        told = self.arrivals[row].output_tokens if self.arrivals and self.output_tokens is None else None
        return self.output_tokens if told is None else told


class _LoadRow(Protocol):
    @property
    def row(self) -> int: ...


S = TypeVar("S", bound=_LoadRow)
P = TypeVar("P")
T = TypeVar("T")
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class Client(Protocol[S, P_co]):
    """A source of requests, such as a `Run`."""

    in_flight: int

    @property
    def remaining(self) -> int: ...

    def send(self) -> S: ...

    def token_ids(self, sent: S, /) -> P_co: ...

    def end(self, sent: S, completion: EngineCompletion, /) -> None: ...


class Pool(Protocol[P_contra]):
    """A simulated engine whose driver admits and finishes requests, such as `SimEngine`."""

    kept_output_tokens: int

    def has_room(self, prompt: P_contra, output_tokens: int | None = None, /) -> bool: ...

    def admit(self, prompt: P_contra, output_tokens: int | None = None, /) -> tuple[EngineCompletion, int]: ...

    def finish(self, handle: int, /) -> None: ...


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """So that each is first as often as the others over many turns."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def interleave(drivers: Sequence[Iterator[None]], advance: Advance = lambda: None) -> None:
    """Equally long runs take turns, request by request, in rotation."""
    for number in count():
        stopped = 0
        for driver in rotated(drivers, number):
            try:
                next(driver)
            except StopIteration:
                stopped += 1
            else:
                advance()
        if stopped == len(drivers):
            return


def serve_in_turn(run: Run, engine: Engine, in_flight: int = 1) -> Iterator[None]:
    """One request after another, answered at once; the last `in_flight` count as running."""
    running: deque[tuple[Sent, EngineCompletion]] = deque()
    while run.remaining:
        while len(running) >= in_flight:
            run.end(*running.popleft())
        sent = run.send()
        running.append((sent, engine.generate(run.token_ids(sent))))
        yield
    while running:
        run.end(*running.popleft())


def serve_virtual(run: Client[S, P], engine: Pool[P], load: Load, times: ServiceTimes) -> Iterator[None]:
    """Under load on a virtual clock. A request is ordered when it is sent and admitted, first come, first served, when
    the engine has room for its blocks, which it holds until its last token. Virtual times are a model and are not
    reported."""
    clock = prefill_ends = 0.0
    running: list[tuple[float, int, int, S, EngineCompletion]] = []
    queue: deque[S] = deque()

    def admit() -> None:
        nonlocal prefill_ends
        while queue:
            sent = queue[0]
            token_ids, length = run.token_ids(sent), load.length(sent.row)
            if running and not engine.has_room(token_ids, length):
                return
            queue.popleft()
            completion, handle = engine.admit(token_ids, length)
            uncached = completion.prompt_tokens - completion.cached_tokens
            prefill_ends = max(clock, prefill_ends) + uncached / times.prefill_tokens_per_s
            answer = engine.kept_output_tokens if length is None else length
            ends = prefill_ends + answer / times.decode_tokens_per_s
            heapq.heappush(running, (ends, sent.row, handle, sent, completion))

    def finish() -> None:
        nonlocal clock
        clock, _, handle, sent, completion = heapq.heappop(running)
        engine.finish(handle)
        run.end(sent, completion)
        admit()

    requests = run.remaining
    bound = load.concurrency or requests
    for row in range(requests):
        at_s = load.at_s(row)
        while running and (run.in_flight >= bound or running[0][0] <= at_s):
            finish()
        clock = max(clock, at_s)
        queue.append(run.send())
        admit()
        yield
    while running:
        finish()


async def closed_loop(ask: Callable[[T], Awaitable[None]], questions: Iterable[T], clients: int) -> None:
    """The questions by `clients` that ask one after another, without a pause."""
    remaining = iter(questions)

    async def client() -> None:
        for question in remaining:
            await ask(question)

    # A group rather than a gather: an error that ends one ends all.
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def serve_live(run: Run, engine: AsyncEngine, load: Load, advance: Advance = lambda: None) -> None:
    """Under load on a server. Requests leave in the order in which they were ordered."""
    if not load.arrivals:
        await closed_loop(lambda _: _serve_one(run, engine, load, advance), range(run.remaining), load.concurrency or 1)
        return
    places = asyncio.Semaphore(load.concurrency) if load.concurrency else None
    now = asyncio.get_running_loop().time
    start = now()
    async with asyncio.TaskGroup() as group:
        for arrival in load.arrivals:
            await asyncio.sleep(max(0.0, start + arrival.at_s - now()))
            if places:
                await places.acquire()
            task = group.create_task(_serve_one(run, engine, load, advance))
            if places:
                task.add_done_callback(lambda _: places.release())


async def serve_live_in_turn(runs: Sequence[tuple[Run, AsyncEngine]], load: Load, advance: Advance) -> None:
    for number in range(runs[0][0].remaining):
        for run, engine in rotated(runs, number):
            await _serve_one(run, engine, load, advance)


async def _serve_one(run: Run, engine: AsyncEngine, load: Load, advance: Advance) -> None:
    """Order, build and send in one step of the event loop: no other request comes in between."""
    sent = run.send()
    try:
        completion = await engine.complete(run.token_ids(sent), load.length(sent.row))
    except RequestError:
        run.fail(sent)
    else:
        run.end(sent, completion)
    advance()
