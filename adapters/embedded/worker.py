"""The engine's asynchronous face: one thread computes, requests go to it and what they bring comes back over queues."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ragorder.kernels.engine import EngineStats, Request, TieredEngine, Update

__all__ = ["EngineStoppedError", "EngineWorker", "TooManyAtOnceError", "TooManyWaitingError"]

T = TypeVar("T")

_logger = logging.getLogger("ragorder.embedded")
_FIGURES_S = 1.0
_END_S = 60.0


class EngineStoppedError(RuntimeError):
    """The engine computes no more: it has failed, or is told to end."""


class TooManyWaitingError(RuntimeError):
    """There is no room for one more request: try again later."""


class TooManyAtOnceError(ValueError):
    """So many requests can never be in the engine together: send fewer at a time."""


News = tuple[int, "Update"] | Exception


@dataclass(eq=False, slots=True)
class _Ticket:
    """Requests that came together, and the way back to whoever asked: whether all were accepted (None, or why not),
    then what comes of them."""

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    verdict: asyncio.Queue[Exception | None] = field(default_factory=asyncio.Queue)
    news: asyncio.Queue[News] = field(default_factory=asyncio.Queue)
    ids: list[Any] = field(default_factory=list)
    left: bool = False

    def judge(self, refusal: Exception | None) -> None:
        self._put(self.verdict, refusal)

    def tell(self, news: News) -> None:
        self._put(self.news, news)

    async def accepted(self) -> None:
        if (refusal := await self.verdict.get()) is not None:
            raise refusal

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        unfinished = len(self.requests)
        while unfinished:
            news = await self.news.get()
            if isinstance(news, Exception):
                raise news
            unfinished -= news[1].completion is not None
            yield news

    def _put(self, queue: asyncio.Queue[T], item: T) -> None:
        # A loop that has ended has nobody left who would ask.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(queue.put_nowait, item)


class EngineWorker:
    """Steps an engine in a thread of its own. At most `max_unfinished` requests are in it, those that wait included.

    `submit` is for one event loop, `stats` and `close` for any thread. What is constant in `engine` (its model's name,
    its sizes, its tokenizer) may be read by all; nothing else of it is to be touched from outside.
    """

    def __init__(self, engine: TieredEngine, *, max_unfinished: int = 1024) -> None:
        self.engine = engine
        self.max_unfinished = max_unfinished
        self._unfinished = 0
        self._failure: str | None = None
        self._ended = False
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._tickets: dict[Any, tuple[_Ticket, int]] = {}
        self._figures = engine.stats()
        self._thread = Thread(target=self._run, name="ragorder-engine", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        """Why nothing is computed any more; None while all is well."""
        return self._failure

    @asynccontextmanager
    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[AsyncIterator[tuple[int, Update]]]:
        """All of these requests, or none: gives what comes of each, with its place among them, until each has its
        completion. What is unfinished at the end of the block is aborted.

        Raises what the engine refuses a request with, TooManyAtOnceError, TooManyWaitingError and EngineStoppedError;
        the last one also where the updates are taken.
        """
        if self._failure is not None:
            raise EngineStoppedError(self._failure)
        if len(requests) > self.max_unfinished:
            raise TooManyAtOnceError(
                f"{len(requests):,} prompts in one request, and at most {self.max_unfinished:,} can be answered or "
                "wait at a time (--max-requests and --max-waiting): send fewer in each"
            )
        if self._unfinished + len(requests) > self.max_unfinished:
            raise TooManyWaitingError(f"{self._unfinished:,} requests are being answered or wait already")
        self._unfinished += len(requests)
        ticket = _Ticket(requests, asyncio.get_running_loop())
        try:
            self._commands.put(partial(self._admit, ticket))
            if self._ended:
                raise EngineStoppedError(self._failure)
            await ticket.accepted()
            yield ticket.updates()
        finally:
            self._unfinished -= len(requests)
            ticket.left = True
            self._commands.put(partial(self._withdraw, ticket))

    def stats(self) -> EngineStats:
        """The engine's figures after its present step; as they were seen last if that takes longer than a second."""
        if self._thread.is_alive():
            asked: Future[EngineStats] = Future()
            self._commands.put(partial(self._tell_figures, asked))
            with suppress(TimeoutError):
                self._figures = asked.result(_FIGURES_S)
        return self._figures

    def close(self) -> None:
        """Abort what is unfinished, close the engine and wait for both. What comes later is refused."""
        self._commands.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            _logger.warning("the engine did not end within %.0f s and is left alone", _END_S)

    def _run(self) -> None:
        while self._obey():
            if self._failure is None and self.engine.has_unfinished:
                try:
                    self._deliver(self.engine.step())
                except BaseException as error:
                    self._fail(error)
        self._stop("the server is about to end")
        try:
            self.engine.close()
        except Exception as error:
            _logger.error("the engine could not be closed: %s", type(error).__name__)
        self._ended = True
        # Whoever came meanwhile is refused as well, whoever comes from now on sees that it has ended.
        with suppress(Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command()

    def _obey(self) -> bool:
        """Do what is asked for; wait for it if there is nothing else to do. Whether to go on."""
        idle = self._failure is not None or not self.engine.has_unfinished
        with suppress(Empty):
            while (command := self._commands.get(block=idle)) is not None:
                command()
                idle = False
            return False
        return True

    def _admit(self, ticket: _Ticket) -> None:
        if self._failure is not None:
            ticket.judge(EngineStoppedError(self._failure))
            return
        try:
            for place, request in enumerate(ticket.requests if not ticket.left else ()):
                request_id = self.engine.add(request)
                ticket.ids.append(request_id)
                self._tickets[request_id] = (ticket, place)
        except Exception as error:
            self._withdraw(ticket)
            ticket.judge(error)
        else:
            ticket.judge(None)

    def _withdraw(self, ticket: _Ticket) -> None:
        for request_id in ticket.ids:
            if self._tickets.pop(request_id, None) is not None and self._failure is None:
                try:
                    self.engine.abort(request_id)
                except Exception as error:
                    self._fail(error)

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            # What was aborted may still be mentioned.
            if (found := self._tickets.get(update.request_id)) is None:
                continue
            ticket, place = found
            if update.completion is not None:
                del self._tickets[update.request_id]
            ticket.tell((place, update))

    def _tell_figures(self, asked: Future[EngineStats]) -> None:
        try:
            asked.set_result(self.engine.stats())
        except Exception:
            # It may have failed for good: then these are its last.
            asked.set_result(self._figures)

    def _fail(self, error: BaseException) -> None:
        # The message of an error may quote a prompt; the lines that it passed do not.
        where = "".join(traceback.format_tb(error.__traceback__))
        _logger.error("the engine failed with %s and computes no more\n%s", type(error).__name__, where)
        self._stop(f"the engine has failed ({type(error).__name__}): start the server again, its log has the place")

    def _stop(self, why: str) -> None:
        self._failure = self._failure or why
        for ticket in {id(ticket): ticket for ticket, _ in self._tickets.values()}.values():
            ticket.tell(EngineStoppedError(self._failure))
        self._tickets.clear()
