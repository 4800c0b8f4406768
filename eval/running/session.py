"""One invocation of `ragorder eval run`: a loop over suites, cells, seeds and policies."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ragorder.eval.data.machine import describe_environment, load_average
from ragorder.eval.running.load import Progress, silent
from ragorder.eval.running.options import Options
from ragorder.eval.running.record import SCHEMA
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Experiment, Job, Line, Missing, Suite, experiment_of


@dataclass(slots=True)
class Outcome:
    runs: int = 0
    copied: int = 0
    unavailable: int = 0
    quality: int = 0


def run_suites(suites: Sequence[Suite], options: Options, store: Store, progress: Progress) -> Outcome:
    """Run what the store lacks; each line is written as soon as it is measured. Raises HarnessError for a store with
    results of other options; CorpusError, EngineError, ImportError or OSError end the invocation. An obstacle in one
    cell is recorded as unavailable."""
    _check_same(options, store)
    return _Session(suites, options, store, progress).run()


@dataclass(slots=True)
class Plan:
    served: list[Job] = field(default_factory=list)
    copied: list[Job] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)


def plan_run(suites: Sequence[Suite], options: Options, store: Store) -> Plan:
    """Raises as `run_suites` does."""
    _check_same(options, store)
    plan = Plan()
    for kind, chosen in _by_kind(suites).items():
        experiment = experiment_of(kind)(options, store, "", silent)
        for job in _jobs(experiment, chosen, plan.missing):
            answers = (each for each in plan.served if _same(experiment, each, job))
            copied = any(set(job.policies) <= set(each.policies) for each in answers)
            (plan.copied if copied else plan.served).append(job)
    return plan


def _same(experiment: Experiment, one: Job, other: Job) -> bool:
    measured = experiment.measurement(other)
    return measured is not None and measured == experiment.measurement(one)


def _check_same(options: Options, store: Store) -> None:
    for session in store.sessions:
        options.check_same(session["arguments"], store.folder)


def _by_kind(suites: Sequence[Suite]) -> dict[str, list[Suite]]:
    found: dict[str, list[Suite]] = {}
    for suite in suites:
        found.setdefault(suite.kind, []).append(suite)
    return found


def _jobs(experiment: Experiment, suites: Sequence[Suite], missing: list[Missing]) -> list[Job]:
    jobs: list[Job] = []
    for suite in suites:
        for found in _plan(experiment, suite):
            (missing if isinstance(found, Missing) else jobs).append(found)  # type: ignore[arg-type]
    return experiment.in_order(jobs)


def _plan(experiment: Experiment, suite: Suite) -> Iterator[Job | Missing]:
    options = experiment.options
    short_form = suite.short_form if options.reduced else suite
    if short_form is not None:
        yield from experiment.plan(short_form)
        return
    asked = [each for each in suite.policies if options.policies is None or each in options.policies]
    reason = "has no short form: run it without --reduced"
    yield from (Missing(suite.name, {}, policy, reason) for policy in asked or ["free"])


def begin_session(append: Callable[[Line], object], arguments: Mapping[str, Any]) -> str:
    """Append the line of a new session, and return its id."""
    started = datetime.now(UTC)
    session = f"{started:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    line = {"type": "session", "schema": SCHEMA, "session": session, "started": started.isoformat(timespec="seconds")}
    append({**line, "arguments": arguments, "environment": describe_environment()})
    return session


class _Session:
    def __init__(self, suites: Sequence[Suite], options: Options, store: Store, progress: Progress) -> None:
        self._suites = suites
        self._options = options
        self._store = store
        self._progress = progress
        self._outcome = Outcome()

    def run(self) -> Outcome:
        self.id = begin_session(self._store.append, self._options.arguments([suite.name for suite in self._suites]))
        for kind, suites in _by_kind(self._suites).items():
            experiment = experiment_of(kind)(self._options, self._store, self.id, self._progress)
            missing: list[Missing] = []
            jobs = _jobs(experiment, suites, missing)
            for each in missing:
                self._miss(each)
            if jobs and (experiment.supports_dry_run or not self._options.dry_run):
                self._measure(experiment, jobs)
        return self._outcome

    def _measure(self, experiment: Experiment, jobs: Sequence[Job]) -> None:
        steps = sum(map(experiment.steps, jobs))
        advance = self._progress(experiment.unit, steps) if steps else silent("", 0)
        with experiment:
            for job in jobs:
                load = load_average()
                for found in experiment.measure(job, advance):
                    if isinstance(found, Missing):
                        self._miss(found)
                    else:
                        self._keep(experiment, job, found, load)
                    load = load_average()

    def _keep(self, experiment: Experiment, job: Job, found: Line, load: float | None) -> None:
        line = found if "type" in found else self._record(experiment, job, {"load_average": load, **found})
        self._store.append(line)
        if "copied_from" in found:
            self._outcome.copied += 1
        elif experiment.counted == "quality":
            self._outcome.quality += 1
        else:
            self._outcome.runs += 1

    def _record(self, experiment: Experiment, job: Job, found: Line) -> Line:
        named = {"session": self.id, "suite": job.suite.name, "cell": job.cell.fields, "seed": job.seed}
        kind = experiment.record.model_fields["type"].default
        return experiment.record.model_validate({"type": kind, **named, **found}).line()

    def _miss(self, missing: Missing) -> None:
        self._outcome.unavailable += 1
        key: dict[str, Any] = {"suite": missing.suite, "cell": missing.cell, "policy": missing.policy}
        key["reason"] = missing.reason
        if not self._store.has("unavailable", **key):
            self._store.append({"type": "unavailable", "session": self.id, **key})
