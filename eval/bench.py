"""A benchmark: policies compared on traces, interleaved, each on a fresh engine of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragorder.eval.arrivals import Arrivals
from ragorder.eval.cache import cache_folder
from ragorder.eval.capacity import Capacity
from ragorder.eval.corpora import Corpus, CorpusError, load_folder, load_pydocs
from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.sim import Like
from ragorder.eval.environment import describe_environment
from ragorder.eval.load import Advance, Load, ServiceTimes
from ragorder.eval.local import MakeRun, serve_on_sim, serve_on_torch, serve_on_vllm
from ragorder.eval.names import unknown
from ragorder.eval.policies import POLICIES, PolicyError, make_policy
from ragorder.eval.prompts import SYSTEM_PROMPT, BuiltPrompts, Prompts
from ragorder.eval.retrieval import Retriever
from ragorder.eval.run_result import RunResult
from ragorder.eval.runner import Run
from ragorder.eval.trace import Trace, trace_of_corpus, trace_of_workload
from ragorder.eval.workloads import make_workload
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.eval.engine_pool import EnginePool

__all__ = [
    "DEFAULT_POLICIES",
    "PYDOCS",
    "Bench",
    "BenchError",
    "Capacity",
    "EventsAddress",
    "Progress",
    "as_json",
    "check_bench",
    "run_bench",
    "run_traces",
    "sources_of",
]

PYDOCS = "pydocs"
DEFAULT_POLICIES = ("retrieval", "greedy", "best", "auto")
_CORPUS_TOP_K = 5
_SCHEMA = 1


class BenchError(ValueError):
    """A benchmark cannot be run as asked. The message says what to change."""


class EventsAddress(NamedTuple):
    """Where a server's KV events are."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Bench:
    """What to measure. `workloads` are names of synthetic workloads or "pydocs", `corpora` folders, "pydocs" or corpora
    that are loaded already. `settings` are those of the policies that are orderers, besides their own. With
    `time_builds` prompts are built as text, too, where the engine takes them without words; with `timelines` the runs
    know how the cache filled. `like` is the simulated engine's: in what order it reuses blocks (`SimEngine`).

    Engine "openai" takes `base_urls`: of one server, where the policies are run one after another, or of one server for
    each policy; without any, a vLLM of its own is started. `events` says where that server's KV events are, for policy
    "events". `capacity` and `block_size` None are the engine's own; engine "torch" has `host_tokens` behind its device.
    `output_tokens` None are those of the arrivals, or else the engine's own. With `concurrency` or `arrivals` the
    engine is under load: see `Load`.
    """

    workloads: Sequence[str] = ()
    corpora: Sequence[str | Corpus] = ()
    order: str = "data"
    retriever: Retriever | None = None
    policies: Sequence[str] = DEFAULT_POLICIES
    engine: str = "sim"
    like: Like = "lru"
    model: Path | None = None
    base_urls: Sequence[str] = ()
    events: EventsAddress | None = None
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    top_k: int | None = None
    capacity: Capacity | None = None
    block_size: int | None = None
    host_tokens: int | None = None
    output_tokens: int | None = None
    waiting: int = 0
    batch: bool = False
    max_wait: int | None = None
    concurrency: int | None = None
    arrivals: Arrivals | None = None
    service_times: ServiceTimes = field(default_factory=ServiceTimes)
    seeds: Sequence[int] = (0,)
    limit: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    time_builds: bool = False
    timelines: bool = False

    @property
    def under_load(self) -> bool:
        return self.concurrency is not None or self.arrivals is not None

    @property
    def requests(self) -> int | None:
        """How many requests are wanted; None: as many as there are."""
        return self.limit or (self.arrivals.count if self.arrivals else None)

    @property
    def answer_tokens(self) -> int | None:
        """What is known of the length of an answer before it is there: as asked for, or the mean of the arrivals."""
        return self.output_tokens or (self.arrivals.output_tokens_mean if self.arrivals else None)

    def load(self, trace: Trace, seed: int) -> Load:
        """Raises ArrivalsError if fewer requests arrive than the trace has."""
        arrivals = self.arrivals.draw(len(trace.requests), seed) if self.arrivals else ()
        return Load(self.concurrency, arrivals, self.output_tokens)

    def describe_load(self) -> dict[str, object] | None:
        if not self.under_load:
            return None
        arrivals = self.arrivals
        return {
            "concurrency": self.concurrency,
            "arrivals": arrivals and arrivals.name,
            "time_scale": arrivals.time_scale if arrivals else 1.0,
            "replicas": arrivals.replicas if arrivals else 1,
        }


Progress = Callable[[str, int], Callable[[], None]]
"""Announces work of so many steps; the result is called after each step."""


Serve = Callable[[Trace, int, MakeRun, Load, Advance], list[Run]]


def _silent(description: str, steps: int) -> Callable[[], None]:
    return lambda: None


def run_bench(bench: Bench, progress: Progress = _silent) -> list[RunResult]:
    """Every policy on every trace and seed.

    Raises WorkloadError, CorpusError, PolicyError, ArrivalsError or BenchError for what cannot be run, EngineError for
    a server that cannot be measured, ImportError naming the extra to install.
    """
    return [run.result() for runs in run_traces(bench, progress) for run in runs]


def run_traces(
    bench: Bench, progress: Progress = _silent, *, keep: bool = False, pool: EnginePool[Any] | None = None
) -> Iterator[list[Run]]:
    """For each trace and seed the runs of all policies, served; with `keep` each knows its served requests. Engines
    "vllm" and "torch" are taken from `pool`, or else from one of its own. Raises as `run_bench` does."""
    check_bench(bench)
    with ExitStack() as stack:
        yield from _run_traces(bench, _server(bench, stack, pool), progress, keep)


def _run_traces(bench: Bench, serve: Serve, progress: Progress, keep: bool) -> Iterator[list[Run]]:
    for source in sources_of(bench):
        traces = {seed: source(seed) for seed in bench.seeds}
        steps = sum(len(trace.requests) for trace in traces.values()) * len(bench.policies)
        advance = progress(next(iter(traces.values())).name, steps)
        for seed, trace in traces.items():
            if not trace.requests:
                raise CorpusError(f"{trace.name} has no requests: raise --limit or choose another")

            def make(name: str, engine: Cache, prompts: Prompts, trace: Trace = trace, seed: int = seed) -> Run:
                text = bench.time_builds and not isinstance(prompts, BuiltPrompts)
                return Run(
                    trace,
                    name,
                    make_policy(name, engine=engine, prompts=prompts, seed=seed, settings=bench.settings),
                    engine,
                    prompts,
                    seed=seed,
                    waiting=bench.waiting,
                    batch=bench.batch,
                    max_wait=bench.max_wait,
                    load=bench.describe_load(),
                    keep=keep,
                    text_builder=PromptBuilder(SYSTEM_PROMPT) if text else None,
                    timeline=bench.timelines,
                )

            yield serve(trace, seed, make, bench.load(trace, seed), advance)


def as_json(bench: Bench, results: Sequence[RunResult]) -> dict[str, object]:
    """The results in the published schema, with the environment that they were measured in."""
    environment = describe_environment()
    if bench.engine in ("vllm", "torch"):
        environment["model"] = str(bench.model or "random weights")
    if bench.engine == "openai":
        environment["model"] = str(bench.served_model or bench.model or "the server's first")
    return {"schema": _SCHEMA, "environment": environment, "runs": [result.as_json() for result in results]}


def check_bench(bench: Bench) -> None:
    """Raises PolicyError or BenchError for what no engine can do."""
    for policy in bench.policies:
        if policy not in POLICIES:
            raise PolicyError(unknown("policy", policy, POLICIES))
    if bench.engine != "sim" and "oracle" in bench.policies:
        raise PolicyError("policy 'oracle' reads the engine's block table: use it with --engine sim")
    if bench.engine == "openai" and "none" in bench.policies:
        raise PolicyError("policy 'none' is the server's to decide, which has its prefix cache on: leave it out")
    if bench.base_urls and len(bench.base_urls) not in (1, len(bench.policies)):
        raise BenchError("--engine openai needs one --base-url, one for each --policy, or none to start a server")
    if "events" in bench.policies and (bench.engine != "openai" or len(bench.base_urls) > 1):
        raise PolicyError("policy 'events' hears what one server's cache holds: use it with --engine openai")
    if "events" in bench.policies and bench.base_urls and bench.events is None:
        raise BenchError("policy 'events' needs --events-endpoint, where the server publishes its KV events")
    if bench.events is not None and not bench.base_urls:
        raise BenchError("--events-endpoint goes with --base-url")
    if bench.engine != "openai" and (bench.base_urls or bench.served_model):
        raise BenchError("--base-url and --served-model go with --engine openai")
    if bench.engine != "torch" and bench.host_tokens:
        raise BenchError("--host-tokens go with --engine torch")
    if bench.engine == "vllm" and (bench.arrivals or bench.concurrency not in (None, 1)):
        raise BenchError(
            "--engine vllm serves one request at a time, in this process: for a load start a server, and use "
            "--engine openai, or take --engine torch"
        )
    if bench.max_wait is not None and not bench.batch:
        raise BenchError("--max-wait goes with --batch")
    if bench.batch and bench.arrivals:
        raise BenchError("--batch plans all requests before the first is served: it goes with --concurrency")


def _server(bench: Bench, stack: ExitStack, pool: EnginePool[Any] | None) -> Serve:
    """Serves a trace and seed under all policies; what it starts ends with the stack."""
    if bench.engine == "openai":
        from ragorder.eval.live import Servers

        return Servers(bench, stack).serve
    if bench.engine == "vllm":
        from ragorder.eval.vllm_pool import VLLMPool

        return partial(serve_on_vllm, bench, pool or stack.enter_context(VLLMPool()))
    if bench.engine == "torch":
        from ragorder.eval.torch_pool import TorchPool

        return partial(serve_on_torch, bench, pool or stack.enter_context(TorchPool(bench.host_tokens or 0)))
    return partial(serve_on_sim, bench)


Source = Callable[[int], Trace]


def sources_of(bench: Bench) -> Iterator[Source]:
    """For each workload and corpus a function from seed to trace."""
    for name in bench.workloads:
        if name == PYDOCS:
            yield _corpus_source(bench, _load(PYDOCS, bench))
        else:
            yield lambda seed, name=name: trace_of_workload(  # type: ignore[misc]
                make_workload(name, seed, top_k=bench.top_k, requests=bench.requests or 0), bench.requests
            )
    for corpus in bench.corpora:
        yield _corpus_source(bench, corpus if isinstance(corpus, Corpus) else _load(corpus, bench))


def _corpus_source(bench: Bench, corpus: Corpus) -> Source:
    top_k, repeat = bench.top_k or _CORPUS_TOP_K, bench.arrivals is not None
    return lambda seed: trace_of_corpus(
        corpus, top_k=top_k, order=bench.order, seed=seed, limit=bench.requests, repeat=repeat
    )


def _load(name: str, bench: Bench) -> Corpus:
    ranked = max(20, bench.top_k or 0)
    if name == PYDOCS:
        return load_pydocs(retriever=bench.retriever, top_k=ranked, cache=cache_folder())
    return load_folder(Path(name), retriever=bench.retriever, top_k=ranked)
