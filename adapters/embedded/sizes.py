"""Settings of an orderer for an embedded engine."""

from __future__ import annotations

from typing import Any

from ragorder.adapters.embedded.worker import EngineWorker
from ragorder.kernels.profile_cache import ProfileCache
from ragorder.settings import Settings

__all__ = ["with_sizes"]


def with_sizes(settings: Settings, worker: EngineWorker) -> Settings:
    """Return the settings with the engine's kind of reuse, its tiers' sizes unless `capacity_tokens` is given, and its
    profile if that has load times."""
    engine, cache = worker.engine, worker.stats().cache
    known: dict[str, Any] = {
        "block_size": engine.block_size,
        "reuse": engine.settings.reuse,
        "recompute": engine.settings.recompute,
    }
    if "capacity_tokens" not in settings.model_fields_set:
        token_bytes = cache.device.capacity_bytes // engine.device_tokens
        known |= {
            "capacity_tokens": engine.device_tokens,
            "host_tokens": cache.host.capacity_bytes // token_bytes,
            "disk_tokens": cache.disk.capacity_bytes // token_bytes,
            "tier_policy": engine.settings.policy,
            "tier_copies": "evicted",
        }
    if settings.profile is None and engine.profile.loads:
        known["profile"] = ProfileCache().file_of(engine.profile)
    return settings.model_copy(update=known)
