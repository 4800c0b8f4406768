"""Metrics of the tiers in vLLM's /metrics, where vLLM adds its labels and, to counters, `_total`."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

__all__ = ["DEVICE_ORDER", "POLICY", "PROFILE", "RequestCounts", "TierCounts", "metric_definitions"]

CHUNKS = "vllm:ragorder_chunks"
BYTES = "vllm:ragorder_bytes"
CAPACITY_BYTES = "vllm:ragorder_capacity_bytes"
OLDEST_SECONDS = "vllm:ragorder_oldest_chunk_seconds"
STORED_CHUNKS = "vllm:ragorder_stored_chunks"
EVICTED_CHUNKS = "vllm:ragorder_evicted_chunks"
REFUSED_CHUNKS = "vllm:ragorder_refused_chunks"
FAILED_TRANSFERS = "vllm:ragorder_failed_transfers"
REQUESTS_WITH_FACTS = "vllm:ragorder_requests_with_facts"
REQUESTS_WITHOUT_FACTS = "vllm:ragorder_requests_without_facts"
REQUESTS_WITH_UNREADABLE_FACTS = "vllm:ragorder_requests_with_unreadable_facts"
DOCUMENTS = "vllm:ragorder_documents"
TENANTS = "vllm:ragorder_tenants"
DEVICE_ORDER = "vllm:ragorder_device_order"
PROFILE = "vllm:ragorder_profile"
POLICY = "vllm:ragorder_policy"

_TIER = ("tier",)


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    return {
        CHUNKS: OffloadingGaugeMetadata("Chunks of KV that a tier holds.", _TIER),
        BYTES: OffloadingGaugeMetadata("Bytes that a tier's chunks take.", _TIER),
        CAPACITY_BYTES: OffloadingGaugeMetadata("Bytes that a tier may take.", _TIER),
        OLDEST_SECONDS: OffloadingGaugeMetadata("Seconds since a tier's oldest chunk arrived; 0 if empty.", _TIER),
        STORED_CHUNKS: OffloadingCounterMetadata("Chunks that were copied into a tier.", _TIER),
        EVICTED_CHUNKS: OffloadingCounterMetadata("Chunks that a tier's policy evicted.", _TIER),
        REFUSED_CHUNKS: OffloadingCounterMetadata(
            "Chunks that a tier did not take or did not give back, by reason.", ("tier", "reason")
        ),
        FAILED_TRANSFERS: OffloadingCounterMetadata(
            "Failed copies between device and a tier; the tokens were computed again.", _TIER
        ),
        REQUESTS_WITH_FACTS: OffloadingCounterMetadata("Requests that gave the ends of their documents."),
        REQUESTS_WITHOUT_FACTS: OffloadingCounterMetadata("Requests without facts about their documents."),
        REQUESTS_WITH_UNREADABLE_FACTS: OffloadingCounterMetadata(
            "Requests with malformed facts, served as if they had none."
        ),
        DOCUMENTS: OffloadingCounterMetadata("Documents in the prompts of requests with facts."),
        TENANTS: OffloadingGaugeMetadata("Distinct tenants of recent requests that named one."),
        DEVICE_ORDER: OffloadingGaugeMetadata(
            "1 while the policy orders the device's evictions, 0 after an error: then vLLM's own order."
        ),
        POLICY: OffloadingGaugeMetadata("1, under the name of the tiers' replacement policy.", ("policy",)),
        PROFILE: OffloadingGaugeMetadata(
            "1 with measured prefill times, 0 while they are awaited, under the key of their file.", ("key",)
        ),
    }


@dataclass(slots=True)
class _Counters:
    _reported: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict, init=False)

    def _grow(self, stats: OffloadingConnectorStats, name: str, count: int, labels: tuple[str, ...] = ()) -> None:
        # An unchanged counter is reported once, so that the page has it from the start.
        before = self._reported.get((name, labels))
        if before is None or count != before:
            stats.increase_counter(name, count - (before or 0), labels)
            self._reported[name, labels] = count


@dataclass(slots=True)
class TierCounts(_Counters):
    """Metrics of one tier ("device", "host" or "disk")."""

    tier: str
    chunks: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    oldest_seconds: float = 0.0
    stored: int = 0
    evicted: int = 0
    failed_transfers: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def report(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        label = (self.tier,)
        stats.set_gauge(CHUNKS, self.chunks, label)
        stats.set_gauge(BYTES, self.bytes, label)
        stats.set_gauge(CAPACITY_BYTES, self.capacity_bytes, label)
        stats.set_gauge(OLDEST_SECONDS, self.oldest_seconds, label)
        self._grow(stats, STORED_CHUNKS, self.stored, label)
        self._grow(stats, EVICTED_CHUNKS, self.evicted, label)
        self._grow(stats, FAILED_TRANSFERS, self.failed_transfers, label)
        for reason, count in self.refused.items():
            self._grow(stats, REFUSED_CHUNKS, count, (self.tier, reason))
        return stats


@dataclass(slots=True)
class RequestCounts(_Counters):
    with_facts: int = 0
    without_facts: int = 0
    unreadable: int = 0
    documents: int = 0
    tenants: int = 0

    def report(self) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        stats.set_gauge(TENANTS, self.tenants)
        self._grow(stats, REQUESTS_WITH_FACTS, self.with_facts)
        self._grow(stats, REQUESTS_WITHOUT_FACTS, self.without_facts)
        self._grow(stats, REQUESTS_WITH_UNREADABLE_FACTS, self.unreadable)
        self._grow(stats, DOCUMENTS, self.documents)
        return stats
