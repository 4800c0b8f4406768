"""The tiers' metrics, to which vLLM adds labels and `_total`."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata, OffloadingMetricMetadata

_OURS = "vllm:ragorder_"
DEVICE_ORDER, POLICY, PROFILE = f"{_OURS}device_order", f"{_OURS}policy", f"{_OURS}profile"

_TIER = ("tier",)
_GAUGES = {
    "chunks": ("Chunks of KV that a tier holds.", _TIER),
    "bytes": ("Bytes that a tier's chunks take.", _TIER),
    "capacity_bytes": ("Bytes that a tier may take.", _TIER),
    "oldest_chunk_seconds": ("Seconds since a tier's oldest chunk arrived; 0 if empty.", _TIER),
    "tenants": ("Distinct tenants of recent requests that named one.", ()),
    "device_order": ("1 while the policy orders the device's evictions, 0 after an error: then vLLM's own order.", ()),
    "policy": ("1, under the name of the tiers' replacement policy.", ("policy",)),
    "profile": ("1 with measured prefill times, 0 while they are awaited, under the key of their file.", ("key",)),
}
_COUNTERS = {
    "stored_chunks": ("Chunks that were copied into a tier.", _TIER),
    "evicted_chunks": ("Chunks that a tier's policy evicted.", _TIER),
    "refused_chunks": ("Chunks that a tier did not take or did not give back, by reason.", ("tier", "reason")),
    "failed_transfers": ("Failed copies between device and a tier; the tokens were computed again.", _TIER),
    "requests_with_facts": ("Requests that gave the ends of their documents.", ()),
    "requests_without_facts": ("Requests without facts about their documents.", ()),
    "requests_with_unreadable_facts": ("Requests with malformed facts, served as if they had none.", ()),
    "documents": ("Documents in the prompts of requests with facts.", ()),
}


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    gauges = {f"{_OURS}{name}": OffloadingGaugeMetadata(*about) for name, about in _GAUGES.items()}
    return gauges | {f"{_OURS}{name}": OffloadingCounterMetadata(*about) for name, about in _COUNTERS.items()}


@dataclass(slots=True)
class _Counters:
    _reported: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict, init=False)

    def _grow(self, stats: OffloadingConnectorStats, name: str, count: int, labels: tuple[str, ...] = ()) -> None:
        # An unchanged counter is reported once, so that the page has it from the start.
        before = self._reported.get((name, labels))
        if before is None or count != before:
            stats.increase_counter(f"{_OURS}{name}", count - (before or 0), labels)
            self._reported[name, labels] = count


@dataclass(slots=True)
class TierCounts(_Counters):
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
        stats, label = OffloadingConnectorStats(), (self.tier,)
        stats.set_gauge(f"{_OURS}chunks", self.chunks, label)
        stats.set_gauge(f"{_OURS}bytes", self.bytes, label)
        stats.set_gauge(f"{_OURS}capacity_bytes", self.capacity_bytes, label)
        stats.set_gauge(f"{_OURS}oldest_chunk_seconds", self.oldest_seconds, label)
        self._grow(stats, "stored_chunks", self.stored, label)
        self._grow(stats, "evicted_chunks", self.evicted, label)
        self._grow(stats, "failed_transfers", self.failed_transfers, label)
        for reason, count in self.refused.items():
            self._grow(stats, "refused_chunks", count, (self.tier, reason))
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
        stats.set_gauge(f"{_OURS}tenants", self.tenants)
        self._grow(stats, "requests_with_facts", self.with_facts)
        self._grow(stats, "requests_without_facts", self.without_facts)
        self._grow(stats, "requests_with_unreadable_facts", self.unreadable)
        self._grow(stats, "documents", self.documents)
        return stats
