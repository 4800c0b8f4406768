"""What is to be run: jobs, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragorder.eval.data.corpora import Corpus
from ragorder.eval.data.corpora.loader import CorpusLoader
from ragorder.eval.experiments.serving.cells import Cell
from ragorder.eval.running.options import Options
from ragorder.eval.running.policies import ORDERERS
from ragorder.eval.running.store import Store
from ragorder.eval.running.suite import Suite

__all__ = ["Job", "Missing", "asked_for", "in_order", "plan_jobs", "served_as"]


@dataclass(frozen=True, slots=True)
class Job:
    """A cell of a suite with one seed, under those policies whose results are not there yet: they take turns."""

    suite: Suite
    cell: Cell
    seed: int
    policies: tuple[str, ...]
    requests: int
    corpus: Corpus | None = None
    engine: str = "sim"

    @property
    def times_builds(self) -> bool:
        """Real engines take prompts that have to be built anyway."""
        return self.suite.times_builds or self.engine != "sim"

    @property
    def warmup(self) -> int:
        """Requests that are in no figure; none in a batch, which is planned as a whole."""
        return 0 if self.cell.batch else min(self.suite.warmup, self.requests // 2)

    @property
    def measurement(self) -> str:
        """What is measured, whichever suite it is for."""
        what = {
            "cell": self.cell.fields,
            "seed": self.seed,
            "requests": self.requests,
            "warmup": self.warmup,
            "builds": self.times_builds,
            "timelines": self.suite.keeps_timelines,
        }
        return json.dumps(what, sort_keys=True)

    def without(self, policies: Sequence[str]) -> Job:
        return replace(self, policies=tuple(policy for policy in self.policies if policy not in policies))


@dataclass(frozen=True, slots=True)
class Missing:
    """A policy in a cell (empty: the whole suite) that cannot be run, and why."""

    suite: str
    cell: dict[str, Any]
    policy: str
    reason: str


def asked_for(suite: Suite, options: Options) -> Suite | list[Missing]:
    """The suite in the form that is asked for, or why there is none."""
    if suite.needs:
        reason = f"needs {suite.needs}"
    elif options.reduced and suite.short_form is None:
        reason = "has no short form: run it without --reduced"
    else:
        return (suite.short_form or suite) if options.reduced else suite
    return [Missing(suite.name, {}, policy, reason) for policy in _policies(suite, options) or ["auto"]]


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Jobs of real engines of one size one after another, since another size means other engines; of those that measure
    the same the one with most policies first, so that it serves the others as well."""

    def size(job: Job) -> tuple[object, ...]:
        cell = job.cell
        return () if job.engine == "sim" else (cell.capacity_tokens, cell.block_size, cell.output_tokens)

    sizes: dict[tuple[object, ...], int] = {}
    measured: dict[str, int] = {}
    placed = []
    for place, job in enumerate(jobs):
        measurement = job.measurement
        first = sizes.setdefault(size(job), place), measured.setdefault(measurement, place), -len(job.policies)
        placed.append((*first, place, job))
    return [job for *_, job in sorted(placed, key=lambda each: each[:-1])]


def plan_jobs(suite: Suite, options: Options, store: Store, shelf: CorpusLoader) -> Iterator[Job | Missing]:
    """The jobs of a suite that serves, without what the store has already, and what is not to be had.

    Raises CorpusError for a corpus that cannot be read.
    """
    asked = asked_for(suite, options)
    if not isinstance(asked, Suite):
        yield from asked
        return
    suite = asked
    policies = _policies(suite, options)
    for cell in suite.cells:
        corpus = shelf.take(cell.corpus) if cell.corpus is not None else None
        reasons = {policy: _unavailable(policy, cell, suite, options) for policy in policies}
        if isinstance(corpus, str):
            reasons, corpus = dict.fromkeys(policies, corpus), None
        yield from (Missing(suite.name, cell.fields, policy, why) for policy, why in reasons.items() if why)
        left = [policy for policy in policies if not reasons[policy]]
        if left == [suite.baseline] and len(policies) > 1:
            continue
        requests = min(suite.requests, options.limit or suite.requests)
        if corpus is not None:
            requests = min(requests, len(corpus.questions))
        # What is exact and the same with every seed is measured once.
        seeds = options.seeds if cell.varies_with_seed or options.engine != "sim" else options.seeds[:1]
        for seed in seeds:
            key = {"suite": suite.name, "cell": cell.fields, "seed": seed}
            todo = tuple(policy for policy in left if not store.has("run", **key, policy=policy))
            if todo:
                yield Job(suite, cell, seed, todo, requests, corpus, options.engine)


def _policies(suite: Suite, options: Options) -> list[str]:
    return [each for each in suite.policies if options.policies is None or each in options.policies]


def served_as(policy: str, cell: Cell) -> str:
    """The name among the benchmark's policies: auto with the engine's events is one of its own there."""
    return "events" if policy == "auto" and cell.residency == "events" else policy


def _unavailable(policy: str, cell: Cell, suite: Suite, options: Options) -> str | None:
    engine = options.engine
    if policy == "oracle" and engine != "sim":
        return "the oracle reads the engine's block table, which only the simulated engine shows"
    if policy == "none" and engine == "openai":
        return "a server's prefix cache is on for all requests or for none: measure it with --engine vllm"
    if cell.residency == "events" and policy in ORDERERS:
        if engine != "openai":
            return f"engine {engine} publishes no KV events: use --engine openai"
        if policy != "auto":
            return "events are followed by policy auto"
        if options.base_url is not None and options.events is None:
            return "nobody said where the server publishes its KV events: give --events-endpoint"
    if engine == "vllm" and (cell.concurrency or 1) > 1:
        return "vLLM in this process serves one request at a time: use --engine openai or torch"
    swept = {name for point in (suite.sweep, *suite.extra) for name in point}
    if engine == "openai" and options.base_url is not None and "capacity_tokens" in swept:
        return "the cache of a running server is as large as it is: leave out --base-url"
    if engine == "openai" and options.base_url is None and not isinstance(cell.capacity_tokens, int):
        return "a server is started with a cache of so many tokens, no share and not without end"
    return None
