"""Runs suites and keeps what was measured."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.data.machine import describe_environment
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.experiments.pipelining.suites import run_pipelining_suites
from ragorder.eval.experiments.quality.suites import run_quality_suite
from ragorder.eval.experiments.replacement.suites import run_replacement_suites
from ragorder.eval.experiments.serving.engines import Engines
from ragorder.eval.experiments.tiering.suites import run_tiering_suites
from ragorder.eval.peers import PEERS, PeerError, make_peer
from ragorder.eval.running.options import Options
from ragorder.eval.running.plan import Job, Missing, asked_for, in_order, plan_jobs
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.runner import Run
from ragorder.eval.running.store import SCHEMA, Store
from ragorder.eval.running.suite import Suite

__all__ = ["Outcome", "Plan", "plan_run", "run_suites"]


@dataclass(slots=True)
class Outcome:
    """What an invocation did: `runs` served, `copied` from another suite that had measured the same, `unavailable`
    ones, and quality lines."""

    runs: int = 0
    copied: int = 0
    unavailable: int = 0
    quality: int = 0


def run_suites(suites: Sequence[Suite], options: Options, store: Store, progress: Progress) -> Outcome:
    """Run what the store has not got yet. Each (cell, seed) is written as soon as it is served.

    Raises HarnessError if the store has results of other options; CorpusError, EngineError, ImportError or OSError for
    what ends the whole invocation. What only one cell cannot have is a line of type "unavailable".
    """
    for session in store.sessions:
        options.check_same(session["arguments"], store.folder)
    return _Session(suites, options, store, progress).run()


@dataclass(slots=True)
class Plan:
    """What would be done: jobs to serve, jobs that one of these answers as well, and what is not to be had."""

    served: list[Job] = field(default_factory=list)
    copied: list[Job] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


def plan_run(suites: Sequence[Suite], options: Options, store: Store) -> Plan:
    """What `run_suites` would do, quality aside. Raises as it does."""
    for session in store.sessions:
        options.check_same(session["arguments"], store.folder)
    plan = Plan()
    jobs = _plan_jobs(suites, options, store, plan.missing)
    for job in jobs:
        answers = (each for each in plan.served if each.measurement == job.measurement)
        copied = any(set(job.policies) <= set(each.policies) for each in answers)
        (plan.copied if copied else plan.served).append(job)
    return plan


def _plan_jobs(suites: Sequence[Suite], options: Options, store: Store, missing: list[Missing]) -> list[Job]:
    """The jobs in the order in which they are to be served; what is not to be had is added to `missing`."""
    shelf = CorpusLoader(options.corpora)
    jobs: list[Job] = []
    for suite in suites:
        for found in plan_jobs(suite, options, store, shelf) if suite.kind == "serve" else ():
            if isinstance(found, Missing):
                missing.append(found)
            else:
                jobs.append(found)
    return in_order(jobs)


_KINDS = {
    "pipelining": run_pipelining_suites,
    "replacement": run_replacement_suites,
    "tiering": run_tiering_suites,
}
"""Those that have their own way of being measured."""


class _Session:
    def __init__(self, suites: Sequence[Suite], options: Options, store: Store, progress: Progress) -> None:
        self.id = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        self._suites = suites
        self._options = options
        self._store = store
        self._progress = progress
        self._outcome = Outcome()
        self._peers: dict[str, str | None] = {}

    def run(self) -> Outcome:
        self._begin()
        missing: list[Missing] = []
        jobs = _plan_jobs(self._suites, self._options, self._store, missing)
        for each in missing:
            self._miss(each.suite, each.cell, [each.policy], each.reason)
        if jobs and not self._options.dry_run:
            advance = self._progress("requests", sum(job.requests * len(job.policies) for job in jobs))
            with Engines(self._options) as engines:
                for job in jobs:
                    self._do(job, engines, advance)
        for suite in self._asked("quality"):
            lines = run_quality_suite(suite, self._options, self._store, self.id, self._progress)
            self._outcome.quality += self._keep(lines)
        for kind, run_suites_of in _KINDS.items():
            asked = list(self._asked(kind))
            lines = run_suites_of(asked, self._options, self._store, self.id, self._progress)
            self._outcome.runs += self._keep(lines)
        return self._outcome

    def _asked(self, kind: str) -> Iterator[Suite]:
        """The suites of a kind in the form that is asked for; what has none is said to be missing."""
        for suite in self._suites:
            if suite.kind == kind:
                asked = asked_for(suite, self._options)
                if isinstance(asked, Suite):
                    yield asked
                    continue
                for each in asked:
                    self._miss(each.suite, each.cell, [each.policy], each.reason)

    def _keep(self, lines: Iterable[Mapping[str, Any]]) -> int:
        """Keep each line as it comes, and say how many are not about what is missing."""
        kept = 0
        for line in lines:
            if line["type"] == "unavailable":
                self._miss(line["suite"], line["cell"], [line["policy"]], line["reason"])
            else:
                self._store.append(line)
                kept += 1
        return kept

    def _begin(self) -> None:
        environment = describe_environment()
        line = {"type": "session", "schema": SCHEMA, "session": self.id, "started": environment["time"]}
        arguments = self._options.arguments(self._suites)
        self._store.append({**line, "arguments": arguments, "environment": environment})

    def _do(self, job: Job, engines: Engines, advance: Callable[[], None]) -> None:
        for peer in [policy for policy in job.policies if policy in PEERS]:
            reason = self._peer_missing(peer)
            if reason is not None:
                self._miss(job.suite.name, job.cell.fields, [peer], reason)
                self._skip(job, [peer], advance)
                job = job.without([peer])
        lines = self._store.measured(job.measurement, job.policies)
        if lines is not None:
            for line in lines:
                copied = {"session": self.id, "suite": job.suite.name, "copied_from": line["suite"]}
                self._store.append({**line, **copied, "measured_in": line.get("measured_in", line["session"])})
            self._outcome.copied += len(lines)
            self._skip(job, job.policies, advance)
            return
        try:
            runs = engines.serve(job, advance)
        except PeerError as error:
            peers = [policy for policy in job.policies if policy in PEERS]
            self._miss(job.suite.name, job.cell.fields, peers, str(error))
            if len(peers) < len(job.policies):
                self._do(job.without(peers), engines, advance)
            return
        except ValueError as error:
            self._miss(job.suite.name, job.cell.fields, job.policies, " ".join(str(error).split()))
            self._skip(job, job.policies, advance)
            return
        for policy, run in zip(job.policies, runs, strict=True):
            self._store.append(_line(self.id, job, policy, run, self._options))
        self._outcome.runs += len(runs)

    def _skip(self, job: Job, policies: Sequence[str], advance: Callable[[], None]) -> None:
        for _ in range(job.requests * len(policies)):
            advance()

    def _miss(self, suite: str, cell: dict[str, Any], policies: Sequence[str], reason: str) -> None:
        for policy in policies:
            self._outcome.unavailable += 1
            key = {"suite": suite, "cell": cell, "policy": policy, "reason": reason}
            if not self._store.has("unavailable", **key):
                self._store.append({"type": "unavailable", "session": self.id, **key})

    def _peer_missing(self, peer: str) -> str | None:
        """Why there is no such peer; it is tried once."""
        if peer not in self._peers:
            try:
                make_peer(peer)
                self._peers[peer] = None
            except PeerError as error:
                self._peers[peer] = str(error)
        return self._peers[peer]


def _line(session: str, job: Job, policy: str, run: Run, options: Options) -> dict[str, Any]:
    engine = run.engine
    model = options.served_model or options.model or (None if options.engine == "sim" else "random weights")
    throughput = run.throughput(skip=job.warmup)
    return {
        "type": "run",
        "session": session,
        "suite": job.suite.name,
        "cell": job.cell.fields,
        "seed": job.seed,
        "policy": policy,
        "engine": {
            "name": engine.name,
            "model": None if model is None else str(model),
            "block_size": engine.block_size,
            "capacity_tokens": engine.capacity_tokens,
            # How the simulated engine reuses blocks.
            **({"like": engine.like} if isinstance(engine, SimEngine) else {}),
        },
        "warmup": job.warmup,
        "failures": run.failures,
        "fallbacks": run.fallbacks,
        "fallback_reason": run.fallback_reason,
        "rows": asdict(run.columns()),
        "throughput": None if throughput is None else asdict(throughput),
        "timeline": None if run.timeline is None else run.timeline.as_json(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "measurement": job.measurement,
    }
