"""Offloading spec: vLLM's own tiering with our settings."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from ragorder.adapters.vllm_tiers.awaited_profile import prefill_costs
from ragorder.adapters.vllm_tiers.cpu_worker import HostCopyWorker
from ragorder.adapters.vllm_tiers.manager import TierManager
from ragorder.adapters.vllm_tiers.metrics import metric_definitions
from ragorder.adapters.vllm_tiers.policy import HostPolicy
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.adapters.vllm_tiers.versions import check_vllm

__all__ = ["TierSpec"]


class TierSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """Spec whose copies are vLLM's on GPUs, our worker's on a CPU. Raises UnsupportedVLLMError, and ValueError for
    impossible settings."""

    _manager: Any
    _worker: Any

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {**super().build_metric_definitions(extra_config), **metric_definitions()}

    def __init__(self, config: OffloadingConfig) -> None:
        check_vllm()
        self.settings = TierSettings.from_extra_config(config.extra_config)
        super().__init__(config)
        if self.num_chunks < 1:
            raise ValueError(
                f"host_bytes is {self.settings.host_bytes}, and one chunk takes {self.kv_bytes_per_chunk} bytes: raise "
                "host_bytes to hold at least the longest prompt, or lower blocks_per_chunk"
            )

    @override
    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            # Before anything is allocated: the profile's file may be unreadable.
            profile = prefill_costs(self.settings, self.config.extra_config)
            manager = super().get_manager()
            policy = manager.primary_tier._policy
            if isinstance(policy, HostPolicy):
                policy.configure(
                    self.settings.policy, self.settings.history, profile, self.settings.max_cached_documents
                )
            # Only the parts of vLLM's manager are needed, which it builds, and cleans up on failure.
            self._manager = TierManager(manager.primary_tier, manager.secondary_tiers, self.kv_bytes_per_chunk)
            self._remove_name()
        return self._manager

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            if self.config.canonical_layout:
                raise ValueError("canonical_layout is not supported on CPUs: remove it from kv_connector_extra_config")
            if int(self.config.extra_config.get("sync_load_budget_bytes") or 0):
                # From 0.33 on; off by default.
                raise ValueError(
                    "sync_load_budget_bytes is not supported on CPUs, where a failed load is computed by its request: "
                    "remove it from kv_connector_extra_config"
                )
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            try:
                self._worker = HostCopyWorker(kv_caches, region, self.blocks_per_chunk)
            except Exception:
                region.cleanup()
                raise
        return self._worker

    def _remove_name(self) -> None:
        """Unlink the file in /dev/shm, which would outlive a killed engine: all workers have it open now."""
        region = self._scheduler_mmap
        if region is not None and not region._creator:
            with suppress(OSError):
                os.unlink(region.mmap_path)
