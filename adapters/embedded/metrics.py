"""Prometheus metrics of the embedded engine, under names of its own and under those of a vLLM with ragorder's tiers.

The latter are read by `ragorder tiers stats`, `ragorder doctor` and `Orderer.for_vllm`. No label names a document or a
tenant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from ragorder.adapters.embedded.translation import TranslatedRequest
from ragorder.adapters.embedded.worker import EngineWorker
from ragorder.kernels.engine import EngineStats

__all__ = ["EngineMetrics"]

_OWN = "ragorder_engine_"
_VLLM = "vllm:"
_TIERS = "vllm:ragorder_"
_NAMES = ("device", "host", "disk")


class EngineMetrics:
    """A collector for a Prometheus registry, with the counts of requests that `count` gets."""

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
        failed = self._worker.failure is not None
        yield _gauge(f"{_OWN}up", "1 while requests are computed, 0 after the engine has failed.", int(not failed))
        yield _gauge(f"{_OWN}running_requests", "Requests that are computed side by side.", stats.running)
        yield _gauge(f"{_OWN}waiting_requests", "Requests that wait in the engine.", stats.waiting)
        ended = {**dict.fromkeys(("stop", "length", "abort", "error"), 0), **stats.finished, "refused": stats.refused}
        yield _counters(f"{_OWN}requests", "Requests by how they ended.", "end", ended)
        tokens = {name: getattr(stats.cached, name) for name in _NAMES}
        tokens["computed"] = stats.prompt_tokens - stats.cached.total
        yield _counters(f"{_OWN}prompt_tokens", "Prompt tokens by where their KV came from.", "source", tokens)
        yield _counter(f"{_OWN}generated_tokens", "Tokens of answers.", stats.generated_tokens)
        yield _counter(f"{_OWN}computed_tokens", "Tokens that went through the model.", stats.computed_tokens)
        yield _counter(f"{_OWN}steps", "Forwards of the model.", stats.steps)
        yield _counter(f"{_OWN}failed_steps", "Forwards that failed, and their requests with them.", stats.failed_steps)
        yield _counter(f"{_OWN}preemptions", "Requests that gave up their blocks to others.", stats.preemptions)
        says = "Seconds from when a request came to its first token."
        yield SummaryMetricFamily(f"{_OWN}ttft_seconds", says, count_value=stats.ttft_count, sum_value=stats.ttft_s_sum)

    def _as_vllm(self, stats: EngineStats) -> Iterator[Metric]:
        """Read by `read_cache_config` and `fetch_tier_stats`."""
        engine = self._worker.engine
        sizes = {
            "block_size": str(engine.block_size),
            # vLLM counts a block that it never uses.
            "num_gpu_blocks": str(engine.device_tokens // engine.block_size + 1),
            "enable_prefix_caching": "True",
            "engine": "0",
        }
        yield InfoMetricFamily(f"{_VLLM}cache_config", "How large the KV cache on the device is.", sizes)
        yield _counter(f"{_VLLM}prefix_cache_queries", "Prompt tokens that were looked up.", stats.prompt_tokens)
        yield _counter(f"{_VLLM}prefix_cache_hits", "Those that were cached, in any tier.", stats.cached.total)
        cached = {name: getattr(stats.cached, name) for name in _NAMES}
        says = "Those that were cached, by tier."
        yield _counters(f"{_VLLM}prompt_tokens_cached_by_source", says, "source", cached)
        for name, says, count in (
            ("requests_with_facts", "Requests that said where their documents end.", self._with_facts),
            ("requests_without_facts", "Requests that said nothing of their documents.", self._without_facts),
            ("requests_with_unreadable_facts", "Requests whose facts were not understood.", self._unreadable_facts),
            ("documents", "Documents in the prompts of requests with facts.", self._documents),
        ):
            yield _counter(f"{_TIERS}{name}", says, count)


def _tiers(stats: EngineStats) -> Iterator[Metric]:
    """The nodes of the knowledge tree by tier: vLLM's tiers call them chunks."""
    tiers = {name: getattr(stats.cache, name) for name in _NAMES}
    tiers = {name: tier for name, tier in tiers.items() if tier.capacity_bytes or tier.refused}

    def figures(field: str) -> dict[str, float]:
        return {name: value for name, tier in tiers.items() if (value := getattr(tier, field)) is not None}

    yield _gauges(f"{_OWN}tier_tokens", "Tokens of the tree that a tier holds.", figures("tokens"))
    yield _gauges(f"{_OWN}tier_used_bytes", "Bytes of a tier in use, by requests as well.", figures("used_bytes"))
    says = "Prompt tokens found in a tier."
    yield _counters(f"{_OWN}tier_hit_tokens", says, "tier", figures("hit_tokens"))
    yield _gauges(f"{_TIERS}chunks", "Nodes of the tree that a tier holds.", figures("nodes"))
    yield _gauges(f"{_TIERS}bytes", "Bytes that these take.", figures("bytes"))
    yield _gauges(f"{_TIERS}capacity_bytes", "Bytes that a tier may take.", figures("capacity_bytes"))
    yield _counters(f"{_TIERS}stored_chunks", "Nodes that were copied into a tier.", "tier", figures("received"))
    yield _counters(f"{_TIERS}evicted_chunks", "Nodes that a tier gave up for others.", "tier", figures("evicted"))
    yield _counters(f"{_TIERS}failed_transfers", "Copies from a tier that failed.", "tier", figures("failed"))
    says = "Nodes that a tier did not take or did not give back, by reason."
    refused = CounterMetricFamily(f"{_TIERS}refused_chunks", says, labels=("tier", "reason"))
    for name, tier in tiers.items():
        for reason, count in (tier.refused or {}).items():
            refused.add_metric((name, reason), count)
    yield refused


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value=value)


def _gauges(name: str, says: str, values: Mapping[str, float]) -> Metric:
    return _labelled(GaugeMetricFamily(name, says, labels=("tier",)), values.items())


def _counter(name: str, says: str, value: float) -> Metric:
    return CounterMetricFamily(name, says, value=value)


def _counters(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labelled(CounterMetricFamily(name, says, labels=(label,)), values.items())


def _labelled(family: Any, values: Iterable[tuple[str, float]]) -> Metric:
    for label, value in values:
        family.add_metric((label,), value)
    metric: Metric = family
    return metric
