"""A benchmark: policies compared on traces, interleaved, each on a fresh engine of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ragorder.eval.cache import cache_folder
from ragorder.eval.corpora import Corpus, CorpusError, load_folder, load_pydocs
from ragorder.eval.engines.base import Engine
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.environment import describe_environment
from ragorder.eval.policies import POLICIES, PolicyError, make_policy
from ragorder.eval.prompts import NumberedPrompts, Prompts
from ragorder.eval.retrieval import Retriever
from ragorder.eval.runner import Run, RunResult, run_interleaved
from ragorder.eval.trace import Trace, trace_of_corpus, trace_of_workload
from ragorder.eval.workloads import make_workload

__all__ = ["DEFAULT_POLICIES", "PYDOCS", "Bench", "Capacity", "Progress", "as_json", "run_bench", "run_traces"]

PYDOCS = "pydocs"
DEFAULT_POLICIES = ("retrieval", "greedy", "best", "auto")
_CORPUS_TOP_K = 5
_SCHEMA = 1
_SIM_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Capacity:
    """The size of an engine's cache: so many tokens, a share of the corpus in percent, or unlimited."""

    tokens: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, text: str) -> Capacity:
        """From "100000", "5%" or "unlimited". Raises ValueError."""
        if text == "unlimited":
            return cls()
        match = re.fullmatch(r"([0-9][0-9_]*)|([0-9]+(?:\.[0-9]+)?)%", text)
        if match and match[1] and int(match[1]):
            return cls(tokens=int(match[1]))
        if match and match[2] and float(match[2]):
            return cls(percent=float(match[2]))
        raise ValueError(f"{text!r} is no capacity: give tokens (100000), a share of the corpus (5%) or unlimited")

    def resolve(self, corpus_tokens: int) -> int | None:
        """In tokens; None: unlimited. Raises ValueError for a share that is less than a token."""
        if self.percent is None:
            return self.tokens
        tokens = int(corpus_tokens * self.percent / 100)
        if not tokens:
            raise ValueError(f"{self.percent}% of {corpus_tokens:,} tokens is no cache: raise --capacity-tokens")
        return tokens


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure. `workloads` are names of synthetic workloads or "pydocs", `corpora` folders or "pydocs"."""

    workloads: Sequence[str] = ()
    corpora: Sequence[str] = ()
    order: str = "data"
    retriever: Retriever | None = None
    policies: Sequence[str] = DEFAULT_POLICIES
    engine: str = "sim"
    model: Path | None = None
    top_k: int | None = None
    capacity: Capacity = Capacity(tokens=100_000)
    block_size: int | None = None
    waiting: int = 0
    batch: bool = False
    seeds: Sequence[int] = (0,)
    limit: int | None = None


Progress = Callable[[str, int], Callable[[], None]]
"""Announces work of so many steps; the result is called after each step."""


def _silent(description: str, steps: int) -> Callable[[], None]:
    return lambda: None


def run_bench(bench: Bench, progress: Progress = _silent) -> list[RunResult]:
    """Every policy on every trace and seed.

    Raises WorkloadError, CorpusError or PolicyError for what cannot be run, ImportError naming the extra to install.
    """
    for policy in bench.policies:
        if policy not in POLICIES:
            raise PolicyError(f"unknown policy {policy!r}: choose from {', '.join(POLICIES)}")
    if bench.engine != "sim" and "oracle" in bench.policies:
        raise PolicyError("policy 'oracle' reads the engine's block table: use it with --engine sim")
    return [run.result() for runs in run_traces(bench, progress) for run in runs]


def run_traces(bench: Bench, progress: Progress = _silent) -> Iterator[list[Run]]:
    """For each trace and seed the runs of all policies, served. Raises as `run_bench` does."""
    for source in _sources(bench):
        yield from _compare(bench, source, progress)


def as_json(bench: Bench, results: Sequence[RunResult]) -> dict[str, object]:
    """The results in the published schema, with the environment that they were measured in."""
    environment = describe_environment()
    if bench.engine == "vllm":
        environment["model"] = str(bench.model or "random weights")
    return {"schema": _SCHEMA, "environment": environment, "runs": [result.as_json() for result in results]}


Source = Callable[[int], Trace]


def _sources(bench: Bench) -> Iterator[Source]:
    """For each workload and corpus a function from seed to trace."""
    for name in bench.workloads:
        if name == PYDOCS:
            yield _corpus_source(bench, _load(PYDOCS, bench))
        else:
            yield lambda seed, name=name: trace_of_workload(  # type: ignore[misc]
                make_workload(name, seed, top_k=bench.top_k, requests=bench.limit or 0), bench.limit
            )
    for name in bench.corpora:
        yield _corpus_source(bench, _load(name, bench))


def _corpus_source(bench: Bench, corpus: Corpus) -> Source:
    top_k = bench.top_k or _CORPUS_TOP_K
    return lambda seed: trace_of_corpus(corpus, top_k=top_k, order=bench.order, seed=seed, limit=bench.limit)


def _load(name: str, bench: Bench) -> Corpus:
    ranked = max(20, bench.top_k or 0)
    if name == PYDOCS:
        return load_pydocs(retriever=bench.retriever, top_k=ranked, cache=cache_folder())
    return load_folder(Path(name), retriever=bench.retriever, top_k=ranked)


def _compare(bench: Bench, source: Source, progress: Progress) -> Iterator[list[Run]]:
    traces = {seed: source(seed) for seed in bench.seeds}
    steps = sum(len(trace.requests) for trace in traces.values()) * len(bench.policies)
    advance = progress(next(iter(traces.values())).name, steps)
    for seed, trace in traces.items():
        if not trace.requests:
            raise CorpusError(f"{trace.name} has no requests: raise --limit or choose another")
        with _engines(bench, trace) as (engines, prompts):
            runs = [
                Run(
                    trace,
                    name,
                    make_policy(name, engine=engine, prompts=prompts, seed=seed),
                    engine,
                    prompts,
                    seed=seed,
                    waiting=bench.waiting,
                    batch=bench.batch,
                )
                for name, engine in zip(bench.policies, engines, strict=True)
            ]
            run_interleaved(runs, advance)
            yield runs


@contextmanager
def _engines(bench: Bench, trace: Trace) -> Iterator[tuple[Sequence[Engine], Prompts]]:
    """A fresh engine for each policy, and the prompts that they take."""
    capacity = bench.capacity.resolve(trace.corpus_tokens)
    if bench.engine == "sim":
        size = bench.block_size or _SIM_BLOCK_SIZE
        yield (
            [
                SimEngine(
                    block_size=size,
                    capacity_tokens=capacity,
                    in_flight=trace.in_flight,
                    prefix_caching=policy != "none",
                )
                for policy in bench.policies
            ],
            NumberedPrompts(),
        )
        return
    from ragorder.eval.serving import random_model, vllm_engines

    model = bench.model or random_model()
    with vllm_engines(model, bench.policies, trace, capacity, bench.block_size) as served:
        yield served
