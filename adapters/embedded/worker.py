"""Asynchronous access to an engine."""

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
from typing import Any

from ragorder.errors import RagorderError
from ragorder.kernels.engine import EngineStats, Request, TieredEngine, Update
from ragorder.kernels.profile_cache import ProfileCache
from ragorder.settings import Settings

_logger = logging.getLogger("ragorder.embedded")
_STATS_TIMEOUT_S = 1.0
_JOIN_TIMEOUT_S = 60.0


class EngineStoppedError(RagorderError, RuntimeError):
    """The engine has failed, or was closed."""


class TooManyWaitingError(RagorderError, RuntimeError):
    status_code = 503


class TooManyAtOnceError(RagorderError, ValueError): ...


@dataclass(eq=False, slots=True)
class _Submission:
    """The event loop gets None once the requests are accepted, then updates, or an error."""

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    ids: list[Any] = field(default_factory=list)
    cancelled: bool = False
    _told: asyncio.Queue[tuple[int, Update] | Exception | None] = field(default_factory=asyncio.Queue)

    def tell(self, progress: tuple[int, Update] | Exception | None) -> None:
        # A closed loop has no waiting task left.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._told.put_nowait, progress)

    async def progress(self) -> tuple[int, Update] | None:
        if isinstance(told := await self._told.get(), Exception):
            raise told
        return told

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        unfinished = len(self.requests)
        while unfinished and (update := await self.progress()) is not None:
            unfinished -= update[1].completion is not None
            yield update


class EngineWorker:
    """Steps an engine in its own thread, with at most `max_unfinished` requests.

        async with worker.submit([request]) as updates:
            async for place, update in updates:
                ...

    `submit` is for one event loop, `stats` and `close` for any thread. Only constants of `engine` may be read outside.
    """

    def __init__(self, engine: TieredEngine, *, max_unfinished: int = 1024) -> None:
        self.engine = engine
        self.max_unfinished = max_unfinished
        self.unfinished = 0
        self.failure: str | None = None
        self._ended = False
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._submissions: dict[Any, tuple[_Submission, int]] = {}
        self._stats = engine.stats()
        self._thread = Thread(target=self._run, name="ragorder-engine", daemon=True)
        self._thread.start()

    @asynccontextmanager
    async def submit(self, requests: Sequence[Request]) -> AsyncIterator[AsyncIterator[tuple[int, Update]]]:
        """Submit all requests or none; unfinished ones are aborted at the end of the block. Raises the engine's
        refusal, TooManyAtOnceError, TooManyWaitingError; EngineStoppedError, also during iteration."""
        if self.failure is not None:
            raise EngineStoppedError(self.failure)
        if len(requests) > self.max_unfinished:
            raise TooManyAtOnceError(
                f"{len(requests):,} prompts in one request exceed the {self.max_unfinished:,} that can be answered "
                "or wait at a time (--max-requests and --max-waiting): send fewer in each"
            )
        if self.unfinished + len(requests) > self.max_unfinished:
            raise TooManyWaitingError(f"{self.unfinished:,} requests are being answered or waiting already")
        self.unfinished += len(requests)
        submission = _Submission(requests, asyncio.get_running_loop())
        try:
            self._commands.put(partial(self._admit, submission))
            if self._ended:
                raise EngineStoppedError(self.failure)
            await submission.progress()
            yield submission.updates()
        finally:
            self.unfinished -= len(requests)
            submission.cancelled = True
            self._commands.put(partial(self._withdraw, submission))

    def stats(self) -> EngineStats:
        """Return statistics after the current step or, after a second, the previous ones."""
        if self._thread.is_alive():
            answer: Future[EngineStats] = Future()
            self._commands.put(partial(self._answer_stats, answer))
            with suppress(TimeoutError):
                self._stats = answer.result(_STATS_TIMEOUT_S)
        return self._stats

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            _logger.warning("the engine did not end within %.0f s ; it is left running", _JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while self._run_commands():
            if self._busy:
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
        # Requests submitted meanwhile are refused here, later ones by `_ended`.
        with suppress(Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command()

    @property
    def _busy(self) -> bool:
        return self.failure is None and self.engine.has_unfinished

    def _run_commands(self) -> bool:
        """Return False once the worker must end."""
        idle = not self._busy
        with suppress(Empty):
            while (command := self._commands.get(block=idle)) is not None:
                command()
                idle = False
            return False
        return True

    def _admit(self, submission: _Submission) -> None:
        if self.failure is not None:
            submission.tell(EngineStoppedError(self.failure))
            return
        try:
            for place, request in enumerate(submission.requests if not submission.cancelled else ()):
                request_id = self.engine.add(request)
                submission.ids.append(request_id)
                self._submissions[request_id] = (submission, place)
        except Exception as error:
            self._withdraw(submission)
            submission.tell(error)
        else:
            submission.tell(None)

    def _withdraw(self, submission: _Submission) -> None:
        for request_id in submission.ids:
            if self._submissions.pop(request_id, None) is not None and self.failure is None:
                try:
                    self.engine.abort(request_id)
                except Exception as error:
                    self._fail(error)

    def _deliver(self, updates: Sequence[Update]) -> None:
        for update in updates:
            # An aborted request may still have updates.
            if (found := self._submissions.get(update.request_id)) is None:
                continue
            submission, place = found
            if update.completion is not None:
                del self._submissions[update.request_id]
            submission.tell((place, update))

    def _answer_stats(self, answer: Future[EngineStats]) -> None:
        try:
            answer.set_result(self.engine.stats())
        except Exception:
            # After a failure the previous statistics are the last ones.
            answer.set_result(self._stats)

    def _fail(self, error: BaseException) -> None:
        # An error's message may quote a prompt; its traceback does not.
        where = "".join(traceback.format_tb(error.__traceback__))
        _logger.error("the engine failed with %s and has stopped\n%s", type(error).__name__, where)
        self._stop(f"the engine has failed ({type(error).__name__}): start the server again; its log has the traceback")

    def _stop(self, why: str) -> None:
        self.failure = self.failure or why
        for submission in {id(submission): submission for submission, _ in self._submissions.values()}.values():
            submission.tell(EngineStoppedError(self.failure))
        self._submissions.clear()


def with_sizes(settings: Settings, worker: EngineWorker) -> Settings:
    """Return the settings with the engine's reuse and profile, and its tiers' sizes if `capacity_tokens` is unset."""
    engine, cache = worker.engine, worker.stats().cache
    known: dict[str, Any] = {
        "block_size": engine.block_size,
        "reuse": engine.settings.reuse,
        "recompute": engine.settings.recompute,
    }
    if "capacity_tokens" not in settings.model_fields_set:
        token_bytes = cache.device.capacity_bytes // engine.device_tokens
        known |= {
            "capacity_tokens": engine.device_tokens,
            "host_tokens": cache.host.capacity_bytes // token_bytes,
            "disk_tokens": cache.disk.capacity_bytes // token_bytes,
            "tier_policy": engine.settings.policy,
            "tier_copies": "evicted",
        }
    if settings.profile is None and engine.profile.loads:
        known["profile"] = ProfileCache().file_of(engine.profile)
    return settings.model_copy(update=known)
