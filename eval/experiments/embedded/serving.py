"""A workload served with caches of several sizes: RAGCache's sweep of host memory, and the rows of RAGCache++ Table 1.

One request at a time, on one engine after another, each with an empty cache: host memory for all of them at the same
time would not fit any machine. Requests are the same ones in the same order, so that arms are compared request by
request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ragorder.document import Document
from ragorder.eval.data.trace import Request, Trace, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import Completion
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.eval.experiments.embedded.clocks import timed
from ragorder.eval.experiments.embedded.prompts import RandomPrompts
from ragorder.eval.experiments.embedded.running import Advance, Experiment, Rows
from ragorder.eval.experiments.embedded.shapes import Shape, hardware
from ragorder.eval.experiments.replacement import SKEWED, TierSize, skewed_stream, stream_of_trace
from ragorder.eval.running.load import serve_in_turn
from ragorder.eval.running.policies import make_policy
from ragorder.eval.running.runner import Run

__all__ = ["Arm", "Workload", "make_arms", "serving_experiments"]


@dataclass(frozen=True, slots=True)
class Workload:
    """So many requests of a synthetic workload or of a stream like RAGCache's ("mmlu-like", "nq-like")."""

    name: str
    requests: int
    warmup: int
    top_k: int | None = None

    def draw(self, seed: int) -> Trace:
        """Raises WorkloadError for one that cannot be drawn so."""
        if self.name not in SKEWED:
            workload = make_workload(self.name, seed, top_k=self.top_k, requests=self.requests)
            return trace_of_workload(workload, self.requests)
        stream = skewed_stream(self.name, seed, top_k=self.top_k or 2, requests=self.requests)
        documents: dict[int, Document] = {}
        requests = []
        for number, drawn in enumerate(stream.requests):
            for each in drawn:
                documents.setdefault(each, Document(f"d{each}", tokens=stream.tokens[each]))
            requests.append(Request(f"What about {number}?", [documents[each] for each in drawn]))
        return Trace(self.name, requests, sum(stream.tokens))


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve: documents in this `order`, in a cache by this replacement `policy` with this `host` behind the
    device. Without a policy nothing is cached."""

    order: str = "retrieval"
    policy: str | None = None
    host: str | None = None

    @property
    def name(self) -> str:
        if self.policy is None:
            return "no cache"
        place = "device" if self.host is None else f"device and {self.host}"
        return f"{place}, {self.policy}" + ("" if self.order == "retrieval" else f", {self.order} order")


def make_arms(orders: Sequence[str], hosts: Sequence[str], policies: Sequence[str]) -> list[Arm]:
    """No cache; the device alone, least recently used first, as prefix caching does it, in each order; and each host
    size by each policy in each order. Raises ValueError for a size that is none."""
    for host in hosts:
        TierSize.parse(host)
    alone = [Arm(order, "lru") for order in orders]
    behind = [Arm(order, policy, host) for order in orders for host in hosts for policy in policies]
    return [Arm(), *alone, *behind]


def serving_experiments(
    arms: Sequence[Arm],
    workload: Workload,
    shape: Shape,
    device: str,
    load: Callable[[], TorchModel],
    *,
    block_size: int,
) -> list[Experiment]:
    """One for each arm. `device` is a size ("4GiB", or a share of the working set, "5%"); raises ValueError for one
    that is none."""
    TierSize.parse(device)
    cell = {
        "measure": "serving",
        "shape": shape.name,
        "hardware": hardware(),
        "workload": workload.name,
        "top_k": workload.top_k,
        "requests": workload.requests,
        "warmup": workload.warmup,
        "device": device,
        "block_size": block_size,
    }
    return [
        Experiment(
            cell,
            [arm.name],
            partial(_measure, arm, workload, device, block_size, load),
            steps=workload.requests,
            warmup=workload.warmup,
        )
        for arm in arms
    ]


def _measure(
    arm: Arm,
    workload: Workload,
    device: str,
    block_size: int,
    load: Callable[[], TorchModel],
    seed: int,
    advance: Advance,
) -> Mapping[str, Rows]:
    """Raises ValueError for a workload that cannot be drawn or a prompt that is longer than the model's longest."""
    model, trace = load(), workload.draw(seed)
    prompts = RandomPrompts(model.vocabulary)
    longest = prompts.prefix_tokens + prompts.question_tokens
    longest += max(sum(document.token_count for document in request.documents) for request in trace.requests)
    device_tokens, host_tokens = _sizes(arm, device, trace, model, longest + 2 * block_size)
    engine = _ClockedEngine(
        model,
        block_size=block_size,
        capacity_tokens=device_tokens,
        host_tokens=host_tokens,
        prefix_caching=arm.policy is not None,
        policy=arm.policy or "lru",
    )
    try:
        engine.warm_up()
        policy = make_policy(arm.order, engine=engine, prompts=prompts, seed=seed)
        run = Run(trace, arm.order, policy, engine, prompts, seed=seed)
        for _ in serve_in_turn(run, engine, trace.in_flight):
            advance()
        return {arm.name: _rows(engine, run)}
    finally:
        engine.close()


def _rows(engine: _ClockedEngine, run: Run) -> Rows:
    served = engine.served
    return {
        "wall_ms": engine.wall_ms,
        "cpu_ms": engine.cpu_ms,
        **{tier: [getattr(each.cached, tier) for each in served] for tier in ("device", "host", "disk")},
        "prompt_tokens": [each.prompt_tokens for each in served],
        "hits": [documents or 0 for documents in run.columns().cached_documents],
        "retrieved": [len(request.documents) for request in run.trace.requests],
    }


def _sizes(arm: Arm, device: str, trace: Trace, model: TorchModel, least: int) -> tuple[int, int]:
    """Of device and host, in tokens: the device holds the longest prompt at least."""
    working_set = stream_of_trace(trace).working_set_tokens

    def tokens(size: str) -> int:
        parsed = TierSize.parse(size)
        if parsed.gib is not None:
            return int(parsed.gib * (1 << 30)) // model.bytes_per_token
        return parsed.tokens(working_set)

    return max(least, tokens(device)), 0 if arm.host is None else tokens(arm.host)


class _ClockedEngine(TorchEngine):
    """It knows what each prompt took by both clocks: with one token of answer that is the time to it."""

    def __init__(self, model: TorchModel, **sizes: Any) -> None:
        super().__init__(model, **sizes)
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []

    def generate(self, token_ids: Sequence[int]) -> Completion:
        completion, wall_ms, cpu_ms = timed(lambda: super(_ClockedEngine, self).generate(token_ids))
        self.wall_ms.append(wall_ms)
        self.cpu_ms.append(cpu_ms)
        return completion

    def reset(self) -> None:
        super().reset()
        self.wall_ms, self.cpu_ms = [], []
