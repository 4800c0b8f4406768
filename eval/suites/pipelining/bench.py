"""The benchmark of pipelines, whose times include retrieval."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from ragorder.document import Document
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.eval.running.bench import check_bench, sources_of
from ragorder.eval.running.load import rotated
from ragorder.eval.running.measures import percentile
from ragorder.eval.running.policies import ORDERERS
from ragorder.eval.running.progress import Progress
from ragorder.eval.running.specs import Bench, BenchError, EngineSpec
from ragorder.eval.suites.pipelining.modes import ask, closed_loop, make_pipeline
from ragorder.eval.suites.pipelining.search import played
from ragorder.eval.suites.pipelining.server import MeasuredServer, ServerFacts, find_server
from ragorder.pipelining import Pipeline, PipelinedStream
from ragorder.prompt import PromptBuilder

__all__ = ["PIPELINES", "PipelineError", "PipelineResult", "run_pipelines"]

PIPELINES = ("none", "warmup", "speculative")

_POLICIES: Mapping[str, Mapping[str, Any]] = {"retrieval": {"max_displacement": 0}, **ORDERERS}
_STAGES = 4


class PipelineError(BenchError):
    """A benchmark cannot be combined with a pipeline. The message says what to change."""


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """`ttft_ms` counts from the question; `exposed_ms` is the mean retrieval time that overlaps with nothing; `tbt_ms`
    is the time between the tokens of an answer. Failed requests count only in `failures`."""

    workload: str
    policy: str
    pipeline: str
    seed: int
    retrieval_delay_ms: float
    concurrency: int
    requests: int
    failures: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: dict[str, float] | None
    exposed_ms: float | None
    warmups: int
    speculations: int
    right: int
    refused: int
    wasted_prompt_tokens: int
    tbt_ms: dict[str, float] | None = None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def run_pipelines(
    bench: Bench, pipeline: str, delay_ms: float, progress: Progress = lambda words, steps: lambda: None
) -> list[PipelineResult]:
    """Every policy on every trace and seed, with this pipeline and without, on one server. Retrieval is a pause of
    `delay_ms`. Modes take turns, or with `concurrency` run one after the other. Raises PipelineError, and as
    `run_bench` does."""
    _check_pipeline(bench, pipeline, delay_ms)
    check_bench(bench)
    modes = ("none",) if pipeline == "none" else ("none", pipeline)
    results: list[PipelineResult] = []
    with ExitStack() as stack:
        facts = _facts(bench, stack)
        builder = PromptBuilder(SYSTEM_PROMPT, tokenizer=facts.tokenizer)
        for source in sources_of(bench):
            traces = {seed: source(seed) for seed in bench.seeds}
            steps = sum(len(trace.requests) for trace in traces.values()) * len(bench.policies) * len(modes)
            advance = progress(next(iter(traces.values())).name, steps)
            for seed, trace in traces.items():
                _check_lengths(trace, builder, facts, bench.output_tokens or 1)
                for policy in bench.policies:
                    run = _PipelineRun(bench, trace, policy, modes, seed, delay_ms, advance)
                    results += asyncio.run(run.serve(facts, builder))
    return results


@dataclass
class _PipelineRun:
    bench: Bench
    trace: Trace
    policy: str
    modes: Sequence[str]
    seed: int
    delay_ms: float
    advance: Callable[[], None]

    def __post_init__(self) -> None:
        self.clients = self.bench.concurrency or 1
        self.ended: dict[str, list[PipelinedStream]] = {mode: [] for mode in self.modes}
        self.failures = dict.fromkeys(self.modes, 0)
        self.salts = {mode: secrets.token_hex(16) for mode in self.modes}

    async def serve(self, facts: ServerFacts, builder: PromptBuilder) -> list[PipelineResult]:
        rankings = [request.documents for request in self.trace.requests]
        retrieval = played(rankings, self.delay_ms / 1e3, stages=_STAGES, seed=self.seed)
        settings = {**_POLICIES[self.policy], **self.bench.settings}
        async with MeasuredServer(facts) as server:
            await server.check(builder)
            tenants = len(self.modes) if self.clients == 1 else 1
            pipelines = {
                mode: make_pipeline(
                    server,
                    mode,
                    retrieval,
                    orderer=server.orderer(builder, tenants=tenants, **settings),
                    builder=builder,
                )
                for mode in self.modes
            }
            if self.clients == 1:
                for number in range(len(rankings)):
                    for mode in rotated(self.modes, number):
                        await self._ask(pipelines[mode], mode, number)
            else:
                for mode in rotated(self.modes, self.seed):
                    asked = partial(self._ask, pipelines[mode], mode)
                    await closed_loop(asked, range(len(rankings)), self.clients)
            for pipeline in pipelines.values():
                await pipeline.close()
        return [self._result(mode) for mode in self.modes]

    async def _ask(self, pipeline: Pipeline[Any, Document, Any], mode: str, number: int) -> None:
        import openai

        question = self.trace.requests[number].question
        asked = ask(number, question, self.salts[mode], self.bench.output_tokens or 1)
        try:
            self.ended[mode].append(await pipeline.answer(asked))
        except openai.OpenAIError:
            self.failures[mode] += 1
        self.advance()

    def _result(self, mode: str) -> PipelineResult:
        ended = self.ended[mode]
        traces = [stream.trace for stream in ended]
        usages = [stream.usage for stream in ended if stream.usage is not None]
        times_ms = [1e3 * trace.first_token_s for trace in traces if trace.first_token_s is not None]
        exposed_ms = [1e3 * trace.exposed_search_s for trace in traces if trace.exposed_search_s is not None]
        return PipelineResult(
            workload=self.trace.name,
            policy=self.policy,
            pipeline=mode,
            seed=self.seed,
            retrieval_delay_ms=self.delay_ms,
            concurrency=self.clients,
            requests=len(self.trace.requests),
            failures=self.failures[mode],
            prompt_tokens=sum(usage.prompt_tokens or 0 for usage in usages),
            cached_tokens=sum(usage.cached_tokens or 0 for usage in usages),
            ttft_ms=_summary(times_ms),
            exposed_ms=round(fmean(exposed_ms), 3) if exposed_ms else None,
            warmups=sum(trace.warmed_up for trace in traces),
            speculations=sum(trace.speculations for trace in traces),
            right=sum(trace.right for trace in traces),
            refused=sum(trace.refused for trace in traces),
            wasted_prompt_tokens=sum(trace.wasted_prompt_tokens for trace in traces),
            tbt_ms=_summary([1e3 * stream.tbt_s for stream in ended if stream.tbt_s is not None], (50, 99)),
        )


def _check_pipeline(bench: Bench, pipeline: str, delay_ms: float) -> None:
    if pipeline not in PIPELINES:
        raise PipelineError(f"unknown pipeline {pipeline!r}: choose from {', '.join(PIPELINES)}")
    if delay_ms < 0:
        raise PipelineError(f"retrieval takes {delay_ms} ms: give a delay of 0 or more")
    if bench.engine == "sim":
        raise PipelineError(
            "the simulated engine has no clock in which retrieval and prefill could overlap: use --engine openai"
        )
    if bench.engine in ("vllm", "torch"):
        raise PipelineError(
            "a pipeline has several requests on their way, which an engine in this process is not asked for: use "
            "--engine openai, which starts a vLLM server if it is given no --base-url"
        )
    if bench.arrivals is not None or bench.batch or bench.waiting:
        raise PipelineError("a pipeline is measured one request at a time, or with --concurrency: leave out the others")
    if len(bench.base_urls) > 1:
        raise PipelineError("a pipeline is measured on one server: give one --base-url")
    for policy in bench.policies:
        if policy not in _POLICIES:
            raise PipelineError(
                f"policy {policy!r} cannot preview its order, which speculation needs: choose from "
                f"{', '.join(_POLICIES)}"
            )


def _facts(spec: EngineSpec, stack: ExitStack) -> ServerFacts:
    base_url = next(iter(spec.base_urls), None)
    if base_url is None:
        from ragorder.eval.running.live import start_server

        base_url = stack.enter_context(start_server(spec)).base_url
    return find_server(
        base_url,
        model=spec.model,
        served_model=spec.served_model,
        api_key=spec.api_key,
        block_size=spec.block_size,
        capacity_tokens=spec.capacity.tokens if spec.capacity else None,
    )


def _check_lengths(trace: Trace, builder: PromptBuilder, facts: ServerFacts, output_tokens: int) -> None:
    room = (facts.longest_tokens or 1 << 60) - output_tokens - builder.prefix_tokens
    for request in trace.requests:
        tokens = builder.suffix_tokens(request.question) + sum(map(builder.document_tokens, request.documents))
        if tokens > room:
            raise EngineError(
                f"a request of {trace.name} is {tokens - room:,} tokens longer than the server takes: lower --top-k or "
                "--output-tokens, or raise the server's --max-model-len"
            )


def _summary(values: Sequence[float], shares: Sequence[int] = (50, 95)) -> dict[str, float] | None:
    if not values:
        return None
    quantiles = {f"p{share}": round(percentile(values, share), 3) for share in shares}
    return {**quantiles, "mean": round(fmean(values), 3)}
