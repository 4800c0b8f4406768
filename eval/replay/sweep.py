"""A log replayed under each policy at each capacity."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, NamedTuple

from ragorder.common.processes import submit_all
from ragorder.errors import RagorderError
from ragorder.eval.data.names import choices
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.replay.log import Log
from ragorder.eval.replay.overlap import compared_requests, measure_overlap
from ragorder.eval.replay.reading import read_log
from ragorder.eval.replay.report import CapacityInfo, LogInfo, ReplayReport
from ragorder.eval.replay.runs import REPLAY_POLICIES, RETRIEVAL, PolicyFigures, Setup, replay_run, steps
from ragorder.eval.running.load import Advance, Progress, ServiceTimes, silent
from ragorder.eval.running.policies import PolicyError

_POLL_S = 0.1


class ReplayError(RagorderError, RuntimeError):
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
            futures = submit_all(pool, _work, enumerate(jobs))
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


DEFAULT_POLICIES = (RETRIEVAL, "greedy", "earned", "free")
SWEEP = tuple(map(Capacity.parse, ("5%", "10%", "25%", "50%", "100%", "unlimited")))
"""Shares of the working set: the length of all distinct documents of a log."""


def replay(
    log: Log | str | Path | IO[bytes],
    *,
    policies: Sequence[str] = DEFAULT_POLICIES,
    capacities: Sequence[Capacity | str | int] = (),
    sweep: Sequence[Capacity] = SWEEP,
    block_size: int = 16,
    prefill_tokens_per_s: float | None = None,
    decode_tokens_per_s: float | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> ReplayReport:
    """What the prefix cache would have saved for the requests of a log.

        replay("log.jsonl.gz", policies=["free"], capacities=["10k", "5%"])

    Retrieval order is always replayed. `sweep` adds its capacities that hold the longest prompt. With a rate requests
    come at their recorded times (`ServiceTimes`), else one at a time. Several `processes` are spawned: a script needs
    its `if __name__ == "__main__":`.

    Raises LogError, PolicyError, ReplayError, and ValueError for what else cannot be run."""
    policies = list(dict.fromkeys([RETRIEVAL, *policies]))
    for policy in policies:
        if policy not in REPLAY_POLICIES:
            raise PolicyError(f"policy {policy!r} cannot be replayed: {choices(policy, REPLAY_POLICIES)}")
    if block_size < 1:
        raise ValueError(f"a block has at least one token, not {block_size}")
    asked = [each if isinstance(each, Capacity) else Capacity.parse(str(each)) for each in capacities]
    setup = Setup(block_size, _service_times(prefill_tokens_per_s, decode_tokens_per_s))
    if not isinstance(log, Log):
        log = read_log(log, progress=progress)
    if not len(log):
        raise ValueError("the log has no requests")
    sizes, left_out = _resolve(log, asked, sweep)
    jobs = [ReplayJob(policy, size.tokens) for size in sizes for policy in policies]
    announce = progress or silent
    overlap = measure_overlap(log, block_size, announce("comparing requests", compared_requests(log)))
    advance = announce(f"replaying {len(jobs)} times {len(log):,} requests", len(jobs) * steps(log))
    started = time.monotonic()
    figures = run_jobs(log, jobs, setup, advance, processes)
    return ReplayReport(
        log=_describe(log, overlap.prompt_tokens),
        overlap=overlap,
        capacities=sizes,
        figures=figures,
        block_size=block_size,
        left_out=left_out,
        timed=setup.service_times is not None,
        prefill_tokens_per_s=prefill_tokens_per_s,
        processes=max(1, min(processes, len(jobs))),
        seconds=time.monotonic() - started,
    )


def _service_times(prefill: float | None, decode: float | None) -> ServiceTimes | None:
    rates = {"prefill_tokens_per_s": prefill, "decode_tokens_per_s": decode}
    given = {name: rate for name, rate in rates.items() if rate is not None}
    if not all(map(isfinite, given.values())):
        raise ValueError("the rates of prefill and decode must be finite: give tokens per second")
    return ServiceTimes(**given) if given else None


def _resolve(log: Log, asked: Sequence[Capacity], sweep: Sequence[Capacity]) -> tuple[list[CapacityInfo], list[str]]:
    """Distinct capacities from small to large, and the names of those left out. Raises ValueError."""
    working_set_tokens, longest_tokens = log.working_set_tokens, log.longest_tokens
    by_tokens: dict[int | None, CapacityInfo] = {}
    left_out = []
    for capacity in asked:
        tokens = capacity.resolve(working_set_tokens)
        by_tokens.setdefault(tokens, CapacityInfo(_name(capacity), tokens, asked=True))
    for capacity in sweep:
        share = capacity.tokens if capacity.percent is None else int(working_set_tokens * capacity.percent / 100)
        if share is not None and share < longest_tokens:
            left_out.append(_name(capacity))
        else:
            by_tokens.setdefault(share, CapacityInfo(_name(capacity), share))
    if not by_tokens:
        raise ValueError("no capacity to replay with: give --capacity-tokens, or leave out --no-sweep")
    return sorted(by_tokens.values(), key=lambda each: (each.tokens is None, each.tokens or 0)), left_out


def _name(capacity: Capacity) -> str:
    if capacity.percent is not None:
        return f"{capacity.percent:g} %"
    return "unlimited" if capacity.tokens is None else f"{capacity.tokens:,} tokens"


def _describe(log: Log, prompt_tokens: int) -> LogInfo:
    return LogInfo(
        name=log.name,
        requests=len(log),
        duration_s=round(log.at_s[-1], 3),
        tenants=log.tenants,
        scopes=len(log.prefix_tokens),
        documents=len(log.document_tokens),
        documents_per_request_mean=round(len(log.documents) / len(log), 2),
        working_set_tokens=log.working_set_tokens,
        prompt_tokens_mean=round(prompt_tokens / len(log), 1),
        longest_tokens=log.longest_tokens,
        out_of_order=log.out_of_order,
        passed_over=log.passed_over,
        estimated_lengths=log.estimated_lengths,
        assumed_lengths=log.assumed_lengths,
    )
