"""vLLM's tiers with our settings, policy and counts."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from typing_extensions import override
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from ragorder.adapters.vllm_tiers.awaited_profile import AwaitedProfile, prefill_costs
from ragorder.adapters.vllm_tiers.cpu_worker import HostCopyWorker
from ragorder.adapters.vllm_tiers.metrics import POLICY, PROFILE, RequestCounts, metric_definitions
from ragorder.adapters.vllm_tiers.policy import HostPolicy, facts_of
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.adapters.vllm_tiers.versions import check_vllm

_MAX_TENANTS = 1024


class TierManager(TieringOffloadingManager):  # type: ignore[misc]
    """Raises ValueError if the host's policy is not a `HostPolicy`."""

    def __init__(
        self,
        primary_tier: CPUPrimaryTierOffloadingManager,
        secondary_tiers: list[SecondaryTierManager],
        chunk_bytes: int,
    ) -> None:
        super().__init__(primary_tier=primary_tier, secondary_tiers=secondary_tiers)
        policy = primary_tier._policy
        if not isinstance(policy, HostPolicy):
            raise ValueError(
                f"eviction_policy is {type(policy).__name__}: use the --kv-transfer-config of `ragorder tiers config`"
            )
        self._policy = policy
        self._chunk_bytes = chunk_bytes
        self._requests = RequestCounts()
        self._tenants: OrderedDict[str, None] = OrderedDict()
        self._failed_chunks: set[int] = set()

    def loads_failed(self, count: int) -> None:
        self._policy.counts.failed_transfers += count

    def stores_failed(self, chunk_ids: set[int]) -> None:
        """Note host chunks whose failed stores are about to be reported as complete."""
        self._failed_chunks |= chunk_ids

    @override
    def on_new_request(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> RequestOffloadingContext:
        self._count_facts(req_context)
        return super().on_new_request(req_context, exclude_tier_idx=exclude_tier_idx)

    def expect(self, req_context: ReqContext) -> None:
        """Reserve a waiting request's chunks in the host, and load them from the disk while there is room."""
        self._policy.serve(req_context)
        awaited = self._policy.expect(req_context)
        if not self.secondary_tiers:
            return
        for key in awaited:
            if self._policy.get(key) is None and super().lookup(key, req_context) is LookupResult.MISS:
                break
        # vLLM polls finished jobs once a step, and this is outside of one.
        self._processed_jobs_this_step = False

    @override
    def on_request_finished(self, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> None:
        self._policy.settle(req_context)
        super().on_request_finished(req_context, exclude_tier_idx=exclude_tier_idx)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> LookupResult:
        self._policy.serve(req_context).looked_up(key)
        return super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx)

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        self._policy.serve(req_context).loaded(keys)
        return super().prepare_load(keys, req_context)

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        # The request's cached chunks are known now, and its computed ones are about to arrive.
        path = self._policy.serve(req_context)
        self._policy.count(req_context)
        return super().prepare_store([key for key in keys if path.admits(key)], req_context)

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        if self._failed_chunks:
            chunks = [self._policy.get(key) for key in keys]
            places = {chunk.chunk_id for chunk in chunks if chunk is not None}
            if places & self._failed_chunks:
                self._failed_chunks -= places
                self._policy.counts.failed_transfers += 1
                success = False
        super().complete_store(keys, req_context, success)

    @override
    def reset_cache(self) -> None:
        super().reset_cache()
        self._failed_chunks.clear()

    @override
    def get_stats(self) -> Any:
        stats = self._policy.current_counts(self._chunk_bytes).report()
        stats.aggregate(self._requests.report())
        stats.set_gauge(POLICY, 1, (self._policy.name,))
        profile = self._policy.profile
        if isinstance(profile, AwaitedProfile):
            stats.set_gauge(PROFILE, int(profile.measured), (profile.key,))
        of_vllm = super().get_stats()
        return stats if of_vllm is None else stats.aggregate(of_vllm)

    def _count_facts(self, request: ReqContext) -> None:
        read, counts = facts_of(request), self._requests
        facts = read.facts
        if not read.readable:
            counts.unreadable += 1
        elif facts is None:
            counts.without_facts += 1
        else:
            counts.with_facts += 1
            counts.documents += len(facts.documents)
            if facts.tenant is not None:
                self._tenants[facts.tenant] = None
                self._tenants.move_to_end(facts.tenant)
                if len(self._tenants) > _MAX_TENANTS:
                    self._tenants.popitem(last=False)
                counts.tenants = len(self._tenants)


class TierSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's own worker copies on GPUs, ours on a CPU. Raises UnsupportedVLLMError, ValueError."""

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
            # vLLM builds the parts of its manager, and cleans up on failure. Only the parts are used.
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
        """Unlink the file in /dev/shm, which would outlive a killed engine. All workers have it open."""
        region = self._scheduler_mmap
        if region is not None and not region._creator:
            with suppress(OSError):
                os.unlink(region.mmap_path)
