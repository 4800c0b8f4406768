"""A workload served with caches of several sizes (RAGCache section 7.4, RAGCache++ Table 1).

One engine after another, as host memory for all of them would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from ragorder.benchmarks.kernels.embedded.cells import CacheSetup, EmbeddedCell
from ragorder.benchmarks.kernels.embedded.models import RandomPrompts, timed
from ragorder.benchmarks.ragcache.replacement.experiment import TierSize
from ragorder.benchmarks.ragcache.replacement.streams import SKEWED, skewed_stream, stream_of_trace
from ragorder.document import Document
from ragorder.eval.data.trace import Trace, TraceRequest, trace_of_workload
from ragorder.eval.data.workloads import make_workload
from ragorder.eval.engines.base import EngineCompletion
from ragorder.eval.engines.torch import TorchEngine, TorchModel
from ragorder.eval.running.load import serve_in_turn
from ragorder.eval.running.policies import make_policy
from ragorder.eval.running.runner import Run


def draw_trace(name: str, seed: int, requests: int, top_k: int | None) -> Trace:
    """Raises WorkloadError for an unknown workload or too large a `top_k`."""
    if name not in SKEWED:
        return trace_of_workload(make_workload(name, seed, top_k=top_k, requests=requests), requests)
    stream = skewed_stream(name, seed, top_k=top_k or 2, requests=requests)
    documents = {number: Document(f"d{number}", tokens=tokens) for number, tokens in enumerate(stream.tokens)}
    drawn = [
        TraceRequest(f"What about {number}?", [documents[each] for each in chosen])
        for number, chosen in enumerate(stream.requests)
    ]
    return Trace(name, drawn, sum(stream.tokens))


def serve_trace(
    trace: Trace,
    cell: EmbeddedCell,
    setup: CacheSetup,
    model: TorchModel,
    seed: int,
    advance: Callable[[], None],
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Return columns and facts of one arm. Raises ValueError for a prompt above the model's limit."""
    prompts = RandomPrompts(model.vocabulary)
    longest = prompts.prefix_tokens + prompts.question_tokens
    longest += max(sum(document.token_count for document in request.documents) for request in trace.requests)
    device_tokens, host_tokens = _sizes(setup, cell.device, trace, model, longest + 2 * cell.block_size)
    measured = setup.policy == "pgdsf"
    engine = _ClockedEngine(
        model,
        block_size=cell.block_size,
        capacity_tokens=device_tokens,
        host_tokens=host_tokens,
        prefix_caching=setup.policy is not None,
        policy=setup.policy or "lru",
        replicate_nodes=setup.replicas,
        fails_after=cell.fails_after,
        profile="auto" if measured else None,
    )
    with closing(engine):
        engine.warm_up()
        policy = make_policy(setup.order, engine=engine, prompts=prompts, seed=seed)
        run = Run(trace, setup.order, policy, engine, prompts, seed=seed)
        for _ in serve_in_turn(run, engine, trace.in_flight):
            advance()
        return _rows(engine, run), {"profile": engine.engine.profile.as_json()} if measured else {}


def _rows(engine: _ClockedEngine, run: Run) -> dict[str, list[float]]:
    served = engine.served
    return {
        "wall_ms": engine.wall_ms,
        "cpu_ms": engine.cpu_ms,
        **{tier: [getattr(each.cached, tier) for each in served] for tier in ("device", "host", "disk")},
        "copied": engine.copied,
        "prompt_tokens": [each.prompt_tokens for each in served],
        "hits": [documents or 0 for documents in run.columns().cached_documents],
        "retrieved": [len(request.documents) for request in run.trace.requests],
    }


def _sizes(setup: CacheSetup, device: str, trace: Trace, model: TorchModel, least: int) -> tuple[int, int]:
    working_set = stream_of_trace(trace).working_set_tokens

    def tokens(size: str) -> int:
        parsed = TierSize.parse(size)
        if parsed.gib is not None:
            return int(parsed.gib * (1 << 30)) // model.bytes_per_token
        return parsed.tokens(working_set)

    return max(least, tokens(device)), 0 if setup.host is None else tokens(setup.host)


class _ClockedEngine(TorchEngine):
    def __init__(self, model: TorchModel, *, fails_after: int | None, **sizes: Any) -> None:
        super().__init__(model, **sizes)
        self._fails_after = fails_after
        self.wall_ms: list[float] = []
        self.cpu_ms: list[float] = []
        self.copied: list[int] = []

    def generate(self, token_ids: Sequence[int]) -> EngineCompletion:
        if len(self.served) == self._fails_after:
            self.engine.forget_device()
        copied = self.engine.stats().cache.host.received
        completion, wall_ms, cpu_ms = timed(lambda: super(_ClockedEngine, self).generate(token_ids))
        self.wall_ms.append(wall_ms)
        self.cpu_ms.append(cpu_ms)
        self.copied.append(self.engine.stats().cache.host.received - copied)
        return completion

    def reset(self) -> None:
        super().reset()
        self.wall_ms, self.cpu_ms, self.copied = [], [], []
