"""Engines in this process, one with an empty cache for each policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ragorder.eval.data.trace import Trace
from ragorder.eval.engines.base import Cache
from ragorder.eval.engines.capacity import Capacity
from ragorder.eval.engines.prompts import NumberedPrompts, Prompts
from ragorder.eval.engines.sim import SimEngine
from ragorder.eval.running.load import Advance, Load, interleave, rotated, serve_in_turn, serve_live, serve_virtual
from ragorder.eval.running.runner import Run

if TYPE_CHECKING:
    from ragorder.eval.engines.pool import EnginePool
    from ragorder.eval.running.specs import Bench

__all__ = ["MakeRun", "serve_from_pool", "serve_on_sim"]
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


def serve_from_pool(
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
        from ragorder.eval.engines.torch_async import AsyncTorchEngine

        for run, engine in rotated(served, seed):
            asyncio.run(serve_live(run, AsyncTorchEngine(engine), load, advance))
    else:
        in_flight = bench.concurrency or trace.in_flight
        interleave([serve_in_turn(run, engine, in_flight) for run, engine in served], advance)
    return runs
