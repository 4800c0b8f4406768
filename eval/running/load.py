"""Drivers: which run sends its next request, and when. In turn, or under load on a virtual or on the real clock.

A driver takes requests from a `Run` and has its engine serve them. Those that need no real time are generators, which
stop after each request that was sent, so that several runs can take turns.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

from ragorder.eval.data.arrivals import Arrival
from ragorder.eval.engines.base import AsyncEngine, Engine, EngineCompletion, RequestError
from ragorder.eval.running.runner import Run, Sent

__all__ = [
    "Advance",
    "Client",
    "Load",
    "Pool",
    "ServiceTimes",
    "interleave",
    "serve_in_turn",
    "serve_live",
    "serve_live_in_turn",
    "serve_virtual",
]

Advance = Callable[[], None]


@dataclass(frozen=True)
class ServiceTimes:
    """How fast the simulated engine is under load: a model, not a measurement, of about what an 8B model does on one
    GPU. Prompts are prefilled one after another, each with its uncached tokens; answers are decoded side by side.

    Raises ValueError for a speed that is not positive."""

    prefill_tokens_per_s: float = 20_000.0
    decode_tokens_per_s: float = 50.0

    def __post_init__(self) -> None:
        if not (self.prefill_tokens_per_s > 0 and self.decode_tokens_per_s > 0):
            raise ValueError("tokens are prefilled and decoded at positive rates: raise --prefill-rate, --decode-rate")


@dataclass(frozen=True)
class Load:
    """When requests are sent: at their `arrivals`, whatever is in flight (open loop), or as soon as another one ends
    (closed loop). `concurrency` bounds those in flight; an arrival beyond it is sent once there is a place.

    The answers have the length that the arrivals tell, or else `output_tokens` (None: the engine's own).
    """

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
P_co = TypeVar("P_co", covariant=True)
P_contra = TypeVar("P_contra", contravariant=True)


class Client(Protocol[S, P_co]):
    """Who has requests to send: a `Run`, or what else is driven like one."""

    in_flight: int

    @property
    def remaining(self) -> int: ...

    def send(self) -> S: ...

    def token_ids(self, sent: S, /) -> P_co: ...

    def end(self, sent: S, completion: EngineCompletion, /) -> None: ...


class Pool(Protocol[P_contra]):
    """A simulated engine whose driver says when a request is admitted and when it has ended: `SimEngine`, or another
    one with prompts of its own."""

    kept_output_tokens: int

    def has_room(self, prompt: P_contra, output_tokens: int | None = None, /) -> bool: ...

    def admit(self, prompt: P_contra, output_tokens: int | None = None, /) -> tuple[EngineCompletion, int]: ...

    def finish(self, handle: int, /) -> None: ...


def interleave(drivers: Sequence[Iterator[None]], advance: Advance = lambda: None) -> None:
    """Let the drivers of equally long runs take turns, request by request; who is first changes with each request."""
    for number in count():
        first = number % len(drivers)
        stopped = 0
        for driver in [*drivers[first:], *drivers[:first]]:
            try:
                next(driver)
            except StopIteration:
                stopped += 1
            else:
                advance()
        if stopped == len(drivers):
            return


def serve_in_turn(run: Run, engine: Engine, in_flight: int = 1) -> Iterator[None]:
    """One request after another, each answered at once; the last `in_flight` of them count as running until the next
    one needs their place."""
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
    """Under load on the simulated engine, on a virtual clock.

    A request is ordered when it is sent. It is admitted when the engine has room for its blocks, first come, first
    served, and holds them until its last token. Virtual times are a model: none is reported.
    """
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


async def serve_live(run: Run, engine: AsyncEngine, load: Load, advance: Advance = lambda: None) -> None:
    """Under load on a server, on the real clock. The requests leave in the order in which they were ordered."""
    if not load.arrivals:
        # A group rather than a gather: an error that ends the run ends all of it.
        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency or 1):
                group.create_task(_serve_on(run, engine, load, advance))
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
    """Several runs on servers of their own, one request at a time in turn; who is first changes with each request."""
    for number in range(runs[0][0].remaining):
        first = number % len(runs)
        for run, engine in [*runs[first:], *runs[:first]]:
            await _serve_one(run, engine, load, advance)


async def _serve_on(run: Run, engine: AsyncEngine, load: Load, advance: Advance) -> None:
    while run.remaining:
        await _serve_one(run, engine, load, advance)


async def _serve_one(run: Run, engine: AsyncEngine, load: Load, advance: Advance) -> None:
    """Order, build and send without letting go of the event loop, so that no other request comes in between."""
    sent = run.send()
    try:
        completion = await engine.complete(run.token_ids(sent), load.length(sent.row))
    except RequestError:
        run.fail(sent)
    else:
        run.end(sent, completion)
    advance()
