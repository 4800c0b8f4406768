"""The benchmark of pipelines, whose times include retrieval."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ragorder.document import Document
from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.prompts import SYSTEM_PROMPT
from ragorder.eval.running.bench import check_bench, sources_of
from ragorder.eval.running.load import Progress, closed_loop, rotated, silent
from ragorder.eval.running.policies import ORDERERS
from ragorder.eval.running.specs import Bench, BenchError
from ragorder.eval.running.suite import Line
from ragorder.eval.suites.pipelining.search import played
from ragorder.eval.suites.pipelining.server import (
    MeasuredServer,
    ServerFacts,
    ask,
    find_or_start,
    make_pipeline,
    milliseconds,
)
from ragorder.pipelining import Pipeline, PipelinedStream
from ragorder.prompt import PromptBuilder

PIPELINES = ("none", "warmup", "speculative")

_POLICIES: Mapping[str, Mapping[str, Any]] = {"retrieval": {"max_displacement": 0}, **ORDERERS}
_STAGES = 4
_COUNTED = ("warmed_up", "speculations", "right", "refused", "wasted_prompt_tokens")
_COLUMNS = ("ttft_ms", "exposed_ms", "tbt_ms", "prompt_tokens", "cached_tokens", *_COUNTED)


def pipeline_lines(
    bench: Bench, pipeline: str, delay_ms: float, session: str, progress: Progress = silent
) -> Iterator[Line]:
    """Yield a line of results.jsonl for every policy on every trace and seed, with this pipeline and without, on one
    server. Retrieval is a pause of `delay_ms`. Modes take turns, or with `concurrency` run one after the other. Raises
    BenchError, and as `run_traces` does."""
    _check_pipeline(bench, pipeline, delay_ms)
    check_bench(bench)
    modes = ("none",) if pipeline == "none" else ("none", pipeline)
    with ExitStack() as stack:
        facts = find_or_start(bench, stack)
        builder = PromptBuilder(SYSTEM_PROMPT, tokenizer=facts.tokenizer)
        for source in sources_of(bench):
            traces = {seed: source(seed) for seed in bench.seeds}
            steps = sum(len(trace.requests) for trace in traces.values()) * len(bench.policies) * len(modes)
            advance = progress(next(iter(traces.values())).name, steps)
            for seed, trace in traces.items():
                _check_lengths(trace, builder, facts, bench.output_tokens or 1)
                for policy in bench.policies:
                    run = _PipelineRun(bench, trace, policy, modes, seed, delay_ms, advance)
                    asyncio.run(run.serve(facts, builder))
                    yield run.line(facts, session)


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
        nothing: list[PipelinedStream | None] = [None] * len(self.trace.requests)
        self.ended = {mode: nothing.copy() for mode in self.modes}
        self.salts = {mode: secrets.token_hex(16) for mode in self.modes}

    async def serve(self, facts: ServerFacts, builder: PromptBuilder) -> None:
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

    async def _ask(self, pipeline: Pipeline[Any, Document, Any], mode: str, number: int) -> None:
        import openai

        question = self.trace.requests[number].question
        asked = ask(number, question, self.salts[mode], self.bench.output_tokens or 1)
        # A request that failed has no figures.
        with suppress(openai.OpenAIError):
            self.ended[mode][number] = await pipeline.answer(asked)
        self.advance()

    def line(self, facts: ServerFacts, session: str) -> Line:
        cell = {"workload": self.trace.name, "order": self.policy, "retrieval_ms": self.delay_ms}
        return {
            "type": "pipelines",
            "session": session,
            "suite": "bench-pipelines",
            "cell": cell | ({"concurrency": self.clients} if self.clients > 1 else {}),
            "seed": self.seed,
            "policy": self.modes[-1],
            "engine": facts.engine(facts.model),
            "rows": {mode: _columns(ended) for mode, ended in self.ended.items()},
        }


def _columns(ended: Sequence[PipelinedStream | None]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for stream in ended:
        found: dict[str, Any] = {}
        if stream is not None:
            trace, usage = stream.trace, stream.usage
            found = {name: getattr(trace, name) for name in _COUNTED}
            found |= {name: getattr(usage, name, None) for name in ("prompt_tokens", "cached_tokens")}
            found |= {"ttft_ms": milliseconds(trace.first_token_s), "tbt_ms": milliseconds(stream.tbt_s)}
            found["exposed_ms"] = milliseconds(trace.exposed_search_s)
        for name, values in rows.items():
            values.append(found.get(name))
    return rows


def _check_pipeline(bench: Bench, pipeline: str, delay_ms: float) -> None:
    if pipeline not in PIPELINES:
        raise BenchError(f"unknown pipeline {pipeline!r}: choose from {', '.join(PIPELINES)}")
    if delay_ms < 0:
        raise BenchError(f"retrieval takes {delay_ms} ms: give a delay of 0 or more")
    if bench.engine == "sim":
        raise BenchError(
            "the simulated engine has no clock in which retrieval and prefill could overlap: use --engine openai"
        )
    if bench.engine in ("vllm", "torch"):
        raise BenchError(
            "a pipeline has several requests on their way, which an engine in this process is not asked for: use "
            "--engine openai, which starts a vLLM server if it is given no --base-url"
        )
    if bench.arrivals is not None or bench.batch or bench.waiting:
        raise BenchError("a pipeline is measured one request at a time, or with --concurrency: leave out the others")
    if len(bench.base_urls) > 1:
        raise BenchError("a pipeline is measured on one server: give one --base-url")
    for policy in bench.policies:
        if policy not in _POLICIES:
            raise BenchError(
                f"policy {policy!r} cannot preview its order, which speculation needs: choose from "
                f"{', '.join(_POLICIES)}"
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
