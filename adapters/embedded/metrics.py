"""Metrics of the embedded engine, including vLLM's names for tiers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from ragorder.adapters.embedded.translation import TranslatedRequest
from ragorder.adapters.embedded.worker import EngineWorker
from ragorder.kernels.engine import TBT_BOUNDS_S, EngineStats
from ragorder.kernels.offload import StreamStats

_ENGINE, _VLLM, _VLLM_TIERS = "ragorder_engine_", "vllm:", "vllm:ragorder_"
_TIER_NAMES = ("device", "host", "disk")
_ENDS = ("stop", "length", "abort", "error", "timeout")


class EngineMetrics:
    """Collector for a Prometheus registry. No label names a document or a tenant."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._with_facts = self._without_facts = self._unreadable_facts = self._documents = 0

    def count(self, translated: TranslatedRequest[Any]) -> None:
        requests = len(translated.requests)
        if not translated.readable:
            self._unreadable_facts += requests
        elif translated.facts is None or not translated.facts.documents:
            self._without_facts += requests
        else:
            self._with_facts += requests
            self._documents += len(translated.facts.documents)

    def collect(self) -> Iterator[Metric]:
        stats = self._worker.stats()
        yield from self._engine(stats)
        yield from _tiers(stats)
        yield from self._as_vllm(stats)

    def _engine(self, stats: EngineStats) -> Iterator[Metric]:
        up = int(self._worker.failure is None)
        yield _gauge("up", "1 while requests are computed, 0 after the engine has failed.", up)
        yield _gauge("running_requests", "Requests computed in each step.", stats.running)
        yield _gauge("waiting_requests", "Requests that wait in the engine.", stats.waiting)
        ended = dict.fromkeys(_ENDS, 0) | dict(stats.finished) | {"refused": stats.refused}
        yield _counters("requests", "Requests by finish reason.", "end", ended)
        tokens = _by_tier(stats.cached)
        tokens["fused"] = stats.fused.total - stats.recomputed
        tokens["computed"] = stats.prompt_tokens - sum(tokens.values())
        yield _counters("prompt_tokens", "Prompt tokens by source of their KV.", "source", tokens)
        says = "Prompt tokens reused approximately, outside the prefix, by tier."
        yield _counters("fused_tokens", says, "tier", _by_tier(stats.fused))
        yield _counter("recomputed_tokens", "Of these, tokens recomputed.", stats.recomputed)
        questions = {"kept": stats.questions_kept, "used": stats.questions_used}
        says = "Questions computed ahead by warm-ups, and used by fused requests."
        yield _counters("questions", says, "event", questions)
        yield _counter("generated_tokens", "Tokens of answers.", stats.generated_tokens)
        yield _counter("computed_tokens", "Tokens of requests that went through the model.", stats.computed_tokens)
        yield _counter("steps", "Forward passes of the model.", stats.steps)
        yield _counter("failed_steps", "Forward passes that failed.", stats.failed_steps)
        yield _counter("retries", "Requests computed again after failed forward passes.", stats.retries)
        yield _counter("preemptions", "Requests that lost their blocks to others.", stats.preemptions)
        name, says = f"{_ENGINE}ttft_seconds", "Seconds from a request's arrival to its first token."
        yield SummaryMetricFamily(name, says, count_value=stats.ttft_count, sum_value=stats.ttft_s_sum)
        bounds = [*map(floatToGoString, TBT_BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            f"{_ENGINE}time_between_tokens_seconds",
            "Seconds from one token of an answer to the next.",
            buckets=list(zip(bounds, accumulate(stats.tbt_counts), strict=True)),
            sum_value=stats.tbt_s_sum,
        )
        if stats.stream is not None:
            yield from _stream(stats.stream)

    def _as_vllm(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield vLLM's names, which `ragorder stats`, `ragorder doctor` and `Orderer.for_vllm` read."""
        engine = self._worker.engine
        sizes = {
            "block_size": str(engine.block_size),
            # vLLM counts a block that it never uses.
            "num_gpu_blocks": str(engine.device_tokens // engine.block_size + 1),
            "enable_prefix_caching": "True",
            "engine": "0",
        }
        yield InfoMetricFamily(f"{_VLLM}cache_config", "Size of the KV cache on the device.", sizes)
        yield _counter("prefix_cache_queries", "Prompt tokens that were looked up.", stats.prompt_tokens, _VLLM)
        says = "Looked up prompt tokens that were cached, in any tier."
        yield _counter("prefix_cache_hits", says, stats.cached.total, _VLLM)
        says = "Cached prompt tokens by tier."
        yield _counters("prompt_tokens_cached_by_source", says, "source", _by_tier(stats.cached), _VLLM)
        for name, says, count in (
            ("requests_with_facts", "Requests that gave the ends of their documents.", self._with_facts),
            ("requests_without_facts", "Requests without facts about their documents.", self._without_facts),
            ("requests_with_unreadable_facts", "Requests with malformed facts.", self._unreadable_facts),
            ("documents", "Documents in the prompts of requests with facts.", self._documents),
        ):
            yield _counter(name, says, count, _VLLM_TIERS)
        says = "Fused requests with documents, by what keeps them from using the build in the disk tier's folder."
        yield _counters("build_requests", says, "fit", stats.build_fits, _VLLM_TIERS)
        says = "Tokens of the system prompt and the model that this build is for, and those of requests."
        sides = GaugeMetricFamily(f"{_VLLM_TIERS}build_prefix_tokens", says, labels=("of", "model"))
        for name, side in stats.build_sides.items():
            sides.add_metric((name, side.model), side.prefix_tokens)
        yield sides


def _stream(stream: StreamStats) -> Iterator[Metric]:
    yield _counter("streamed_bytes", "Bytes of weights read from the model's files.", stream.bytes)
    uses = {"ready": stream.hits, "waited": stream.waits}
    yield _counters("streamed_layers", "Uses of streamed layers, ready or waited for.", "found", uses)
    yield _counter("stream_wait_seconds", "Time for which steps have waited for layers.", stream.waits_s)
    layers = {"device": stream.device_layers, "host": stream.host_layers, "disk": stream.disk_layers}
    yield _gauges("layers", "Decoder layers by the place of their weights.", layers)
    kv = {"device": sum(layers.values()) - stream.kv_host_layers, "host": stream.kv_host_layers}
    yield _gauges("kv_layers", "Decoder layers by the place of the KV that running requests use.", kv)
    yield _gauge("moving_layers", "Decoder layers that a placement has still to move.", stream.moving)
    moves = {"moved": stream.moved, "unreadable": stream.unmoved}
    yield _counters("layer_moves", "Decoder layers that have changed their place, or could not be read.", "end", moves)


def _tiers(stats: EngineStats) -> Iterator[Metric]:
    tiers = {name: getattr(stats.cache, name) for name in _TIER_NAMES}
    tiers = {name: tier for name, tier in tiers.items() if tier.capacity_bytes or tier.refused}

    def figures(field: str) -> dict[str, float]:
        return {name: value for name, tier in tiers.items() if (value := getattr(tier, field)) is not None}

    yield _gauges("tier_tokens", "Tokens of the tree that a tier holds.", figures("tokens"))
    yield _gauges("tier_used_bytes", "Bytes of a tier in use, by requests as well.", figures("used_bytes"))
    yield _counters("tier_hit_tokens", "Prompt tokens found in a tier.", "tier", figures("hit_tokens"))
    yield _gauges("chunks", "Nodes of the tree that a tier holds.", figures("nodes"), _VLLM_TIERS)
    yield _gauges("bytes", "Bytes of these nodes.", figures("bytes"), _VLLM_TIERS)
    yield _gauges("capacity_bytes", "Bytes that a tier may take.", figures("capacity_bytes"), _VLLM_TIERS)
    for name, says, field in (
        ("stored_chunks", "Nodes that were copied into a tier.", "received"),
        ("evicted_chunks", "Nodes that a tier evicted.", "evicted"),
        ("failed_transfers", "Copies from a tier that failed.", "failed"),
    ):
        yield _counters(name, says, "tier", figures(field), _VLLM_TIERS)
    says = "Nodes that a tier did not take or did not give back, by reason."
    refused = CounterMetricFamily(f"{_VLLM_TIERS}refused_chunks", says, labels=("tier", "reason"))
    for name, tier in tiers.items():
        for reason, count in (tier.refused or {}).items():
            refused.add_metric((name, reason), count)
    yield refused


def _by_tier(tokens: object) -> dict[str, int]:
    return {name: getattr(tokens, name) for name in _TIER_NAMES}


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(_ENGINE + name, says, value=value)


def _gauges(name: str, says: str, values: Mapping[str, float], prefix: str = _ENGINE) -> Metric:
    return _labelled(GaugeMetricFamily(prefix + name, says, labels=("tier",)), values.items())


def _counter(name: str, says: str, value: float, prefix: str = _ENGINE) -> Metric:
    return CounterMetricFamily(prefix + name, says, value=value)


def _counters(name: str, says: str, label: str, values: Mapping[str, float], prefix: str = _ENGINE) -> Metric:
    return _labelled(CounterMetricFamily(prefix + name, says, labels=(label,)), values.items())


def _labelled(family: Any, values: Iterable[tuple[str, float]]) -> Metric:
    for label, value in values:
        family.add_metric((label,), value)
    metric: Metric = family
    return metric
