"""A benchmark: policies compared on traces, interleaved, each on a fresh engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import PYDOCS, Corpus, CorpusError, load_folder, load_pydocs
from ragorder.eval.data.names import unknown
from ragorder.eval.data.trace import Trace, trace_of_corpus, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.prompts import SYSTEM_PROMPT, BuiltPrompts, NumberedPrompts, Prompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.load import (
    Advance,
    Load,
    Progress,
    interleave,
    rotated,
    serve_in_turn,
    serve_live,
    serve_virtual,
    silent,
)
from ragorder.eval.running.policies import POLICIES, PolicyError, make_policy
from ragorder.eval.running.runner import MakeRun, Run
from ragorder.eval.running.specs import Bench, BenchError, TraceSpec
from ragorder.prompt import PromptBuilder

if TYPE_CHECKING:
    from ragorder.eval.engines.pool import EnginePool

_CAPACITY = Capacity(tokens=100_000)
_SIM_BLOCK_SIZE = 16
_SIM_OUTPUT_TOKENS = 32
Serve = Callable[[Trace, int, MakeRun, Load, Advance], list[Run]]

_CORPUS_TOP_K = 5


def run_traces(
    bench: Bench, progress: Progress = silent, *, keep: bool = False, pool: EnginePool[Any] | None = None
) -> Iterator[list[Run]]:
    """The served runs of all policies, for each trace and seed; `keep` keeps their requests. Engines "vllm" and "torch"
    come from `pool`. Raises BenchError and the other errors of the command."""
    check_bench(bench)

    def make(trace: Trace, seed: int, name: str, engine: Cache, prompts: Prompts) -> Run:
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

    with ExitStack() as stack:
        serve = _server(bench, stack, pool)
        for source in sources_of(bench):
            traces = {seed: source(seed) for seed in bench.seeds}
            steps = sum(len(trace.requests) for trace in traces.values()) * len(bench.policies)
            advance = progress(next(iter(traces.values())).name, steps)
            for seed, trace in traces.items():
                if not trace.requests:
                    raise CorpusError(f"{trace.name} has no requests: raise --limit or choose another")
                yield serve(trace, seed, partial(make, trace, seed), bench.load(trace, seed), advance)


def bench_lines(bench: Bench, session: str, progress: Progress = silent) -> Iterator[dict[str, Any]]:
    """Yield a line of results.jsonl for each policy on each trace and seed. Raises as `run_traces`."""
    named = {"openai": str(bench.served_model or bench.model or "the server's first"), "sim": None}
    model = named.get(bench.engine, str(bench.model or "random weights"))
    for runs in run_traces(bench, progress):
        for run in runs:
            key = {"suite": "bench", "cell": _cell(bench, run.trace), "seed": run.seed, "policy": run.policy_name}
            yield {"type": "run", "session": session, **key, **run.fields(model)}


def _cell(bench: Bench, trace: Trace) -> dict[str, Any]:
    """What differs from the defaults, as `ServingCell` names it."""
    capacity = bench.capacity
    said = {
        "workload" if trace.name in bench.workloads else "corpus": trace.name,
        "order": None if trace.order == "data" else trace.order,
        "top_k": max(len(request.documents) for request in trace.requests),
        "capacity_tokens": capacity and (capacity.tokens or str(capacity)),
        **{name: getattr(bench, name) or None for name in ("host_tokens", "waiting", "batch")},
        **{name: getattr(bench, name) for name in ("block_size", "output_tokens", "max_wait")},
        **{name: value for name, value in (bench.describe_load() or {}).items() if value != 1},
    }
    return {name: value for name, value in said.items() if value is not None}


def check_bench(bench: Bench) -> None:
    """Raises PolicyError or BenchError."""
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
        raise PolicyError("policy 'events' follows one server's KV events: use it with --engine openai")
    if "events" in bench.policies and bench.base_urls and bench.events is None:
        raise BenchError("policy 'events' needs --events-endpoint, where the server publishes its KV events")
    if bench.events is not None and not bench.base_urls:
        raise BenchError("--events-endpoint requires --base-url")
    if bench.engine != "openai" and (bench.base_urls or bench.served_model):
        raise BenchError("--base-url and --served-model require --engine openai")
    if bench.engine != "torch" and bench.host_tokens:
        raise BenchError("--host-tokens require --engine torch")
    if bench.engine == "vllm" and (bench.arrivals or bench.concurrency not in (None, 1)):
        raise BenchError(
            "--engine vllm serves one request at a time, in this process: for a load start a server, and use "
            "--engine openai, or take --engine torch"
        )
    if bench.max_wait is not None and not bench.batch:
        raise BenchError("--max-wait requires --batch")
    if bench.batch and bench.arrivals:
        raise BenchError("--batch plans all requests before the first is served: use it with --concurrency")


def _server(bench: Bench, stack: ExitStack, pool: EnginePool[Any] | None) -> Serve:
    if bench.engine == "openai":
        from ragorder.eval.running.live import Servers

        return Servers(bench, stack).serve
    if bench.engine in ("vllm", "torch"):
        from ragorder.eval.engines.pool import TorchPool, VLLMPool

        if pool is None:
            made: EnginePool[Any] = VLLMPool() if bench.engine == "vllm" else TorchPool(bench.host_tokens or 0)
            pool = stack.enter_context(made)
        return partial(_serve_from_pool, bench, pool)
    return partial(_serve_on_sim, bench)


Source = Callable[[int], Trace]


def sources_of(spec: TraceSpec) -> Iterator[Source]:
    for name in spec.workloads:
        if name == PYDOCS:
            yield _corpus_source(spec, _load(PYDOCS, spec))
        else:
            yield lambda seed, name=name: trace_of_workload(  # type: ignore[misc]
                make_workload(name, seed, top_k=spec.top_k, requests=spec.requests or 0), spec.requests
            )
    for corpus in spec.corpora:
        yield _corpus_source(spec, corpus if isinstance(corpus, Corpus) else _load(corpus, spec))


def _corpus_source(spec: TraceSpec, corpus: Corpus) -> Source:
    top_k, repeat = spec.top_k or _CORPUS_TOP_K, spec.arrivals is not None
    return lambda seed: trace_of_corpus(
        corpus, top_k=top_k, order=spec.order, seed=seed, limit=spec.requests, repeat=repeat
    )


def _load(name: str, spec: TraceSpec) -> Corpus:
    ranked = max(20, spec.top_k or 0)
    if name == PYDOCS:
        return load_pydocs(retriever=spec.retriever, top_k=ranked, cache=cache_folder())
    return load_folder(Path(name), retriever=spec.retriever, top_k=ranked)


def _serve_on_sim(bench: Bench, trace: Trace, seed: int, make: MakeRun, load: Load, advance: Advance) -> list[Run]:
    prompts = NumberedPrompts()
    runs, drivers = [], []
    for policy in bench.policies:
        engine = SimEngine(
            block_size=bench.block_size or _SIM_BLOCK_SIZE,
            capacity_tokens=(bench.capacity or _CAPACITY).resolve(trace.corpus_tokens),
            in_flight=trace.in_flight,
            output_tokens=bench.answer_tokens or _SIM_OUTPUT_TOKENS,
            prefix_caching=policy != "none",
            like=bench.like,
        )
        run = make(policy, engine, prompts)
        virtual = serve_virtual(run, engine, load, bench.service_times)
        drivers.append(virtual if bench.under_load else serve_in_turn(run, engine, trace.in_flight))
        runs.append(run)
    interleave(drivers, advance)
    return runs


def _serve_from_pool(
    bench: Bench, pool: EnginePool[Any], trace: Trace, seed: int, make: MakeRun, load: Load, advance: Advance
) -> list[Run]:
    """In turn, one request at a time; on the embedded engine under load one policy after another, rotated by seed."""
    from ragorder.eval.engines.models import random_model

    capacity_tokens = (bench.capacity or _CAPACITY).resolve(trace.corpus_tokens)
    sizes = (capacity_tokens, bench.block_size, bench.answer_tokens or 1)
    engines, prompts = pool.take(bench.model or random_model(), bench.policies, trace, *sizes)
    runs = [make(policy, engine, prompts) for policy, engine in zip(bench.policies, engines, strict=True)]
    served = list(zip(runs, engines, strict=True))
    if bench.engine == "torch" and bench.under_load:
        from ragorder.eval.engines.torch import AsyncTorchEngine

        for run, engine in rotated(served, seed):
            asyncio.run(serve_live(run, AsyncTorchEngine(engine), load, advance))
    else:
        in_flight = bench.concurrency or trace.in_flight
        interleave([serve_in_turn(run, engine, in_flight) for run, engine in served], advance)
    return runs
