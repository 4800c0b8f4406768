"""Engines in this process, one with an empty cache for each policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.prompts import NumberedPrompts, Prompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.load import Advance, Load, interleave, rotated, serve_in_turn, serve_live, serve_virtual
from ragorder.eval.running.runner import Run

if TYPE_CHECKING:
    from ragorder.eval.engines.pool import EnginePool, WarmedUp
    from ragorder.eval.engines.torch import TorchEngine
    from ragorder.eval.engines.vllm import VLLMEngine
    from ragorder.eval.running.specs import Bench

__all__ = ["MakeRun", "serve_on_sim", "serve_on_torch", "serve_on_vllm"]

E = TypeVar("E", bound="WarmedUp")
MakeRun = Callable[[str, Cache, Prompts], Run]
"""A fresh run of the policy of this name on an engine, with the prompts that the engine takes."""

_CAPACITY = Capacity(tokens=100_000)
_SIM_BLOCK_SIZE = 16
_SIM_OUTPUT_TOKENS = 32


def serve_on_sim(bench: Bench, trace: Trace, seed: int, make: MakeRun, load: Load, advance: Advance) -> list[Run]:
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


def serve_on_vllm(
    bench: Bench,
    pool: EnginePool[VLLMEngine],
    trace: Trace,
    seed: int,
    make: MakeRun,
    load: Load,
    advance: Advance,
) -> list[Run]:
    served = _from_pool(bench, pool, trace, make)
    in_flight = bench.concurrency or trace.in_flight
    interleave([serve_in_turn(run, engine, in_flight) for run, engine in served], advance)
    return [run for run, _ in served]


def serve_on_torch(
    bench: Bench,
    pool: EnginePool[TorchEngine],
    trace: Trace,
    seed: int,
    make: MakeRun,
    load: Load,
    advance: Advance,
) -> list[Run]:
    """In turn, one request at a time; under load one policy after another, rotated by seed."""
    from ragorder.eval.engines.torch_async import AsyncTorchEngine

    served = _from_pool(bench, pool, trace, make)
    if bench.under_load:
        for run, engine in rotated(served, seed):
            asyncio.run(serve_live(run, AsyncTorchEngine(engine), load, advance))
    else:
        interleave([serve_in_turn(run, engine, trace.in_flight) for run, engine in served], advance)
    return [run for run, _ in served]


def _from_pool(bench: Bench, pool: EnginePool[E], trace: Trace, make: MakeRun) -> list[tuple[Run, E]]:
    from ragorder.eval.engines.models import random_model

    capacity_tokens = (bench.capacity or _CAPACITY).resolve(trace.corpus_tokens)
    sizes = (capacity_tokens, bench.block_size, bench.answer_tokens or 1)
    engines, prompts = pool.take(bench.model or random_model(), bench.policies, trace, *sizes)
    runs = [make(policy, engine, prompts) for policy, engine in zip(bench.policies, engines, strict=True)]
    return list(zip(runs, engines, strict=True))
