"""Jobs of a replay, one for each policy and capacity, in one or several processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, NamedTuple

from ragorder.eval.replay.log import Log
from ragorder.eval.replay.runs import PolicyFigures, Setup, replay_run
from ragorder.eval.running.load import Advance

__all__ = ["ReplayError", "ReplayJob", "run_jobs"]

_POLL_S = 0.1


class ReplayError(RuntimeError):
    """A replay cannot be run or finished."""


class ReplayJob(NamedTuple):
    """A policy at a capacity (None: unlimited)."""

    policy: str
    capacity_tokens: int | None


def run_jobs(
    log: Log, jobs: Sequence[ReplayJob], setup: Setup, advance: Advance, processes: int = 1
) -> list[PolicyFigures]:
    """The figures of the jobs, in their order. Several processes are spawned, each with a copy of the log. Raises
    ReplayError if one of them dies."""
    processes = min(processes, len(jobs))
    if processes <= 1:
        return [replay_run(log, *job, setup, advance) for job in jobs]
    context = get_context("spawn")
    # One cell for each writer, and no lock that a process could die with.
    told, stop = context.RawArray("q", len(jobs)), context.RawValue("b", 0)
    with ProcessPoolExecutor(processes, context, _begin, (log, setup, told, stop)) as pool:
        try:
            futures = [pool.submit(_work, number, job) for number, job in enumerate(jobs)]
            _watch(futures, told, advance)
            return [future.result() for future in futures]
        except BrokenProcessPool:
            raise ReplayError("a process of the replay died: if it ran out of memory, lower --processes") from None
        finally:
            stop.value = 1
            pool.shutdown(cancel_futures=True)


def _watch(futures: Sequence[Future[PolicyFigures]], told: Any, advance: Advance) -> None:
    passed_on = 0
    pending = set(futures)
    while pending:
        done, pending = wait(pending, _POLL_S, FIRST_EXCEPTION)
        for _ in range(passed_on, now := sum(told)):
            advance()
        passed_on = now
        if any(future.exception() for future in done):
            return


class _StoppedError(Exception):
    pass


_shared: tuple[Log, Setup, Any, Any]


def _begin(*shared: Any) -> None:
    """Initialise a process, in which interrupts are ignored: the parent handles them."""
    global _shared
    _shared = shared
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _work(number: int, job: ReplayJob) -> PolicyFigures:
    log, setup, told, stop = _shared

    def advance() -> None:
        told[number] += 1
        if stop.value:
            raise _StoppedError

    return replay_run(log, *job, setup, advance)
