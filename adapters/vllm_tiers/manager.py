"""vLLM's manager of the tiers, with our policy, counts and failing copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

from ragorder.adapters.vllm_tiers.awaited_profile import AwaitedProfile
from ragorder.adapters.vllm_tiers.metrics import POLICY, PROFILE, RequestCounts
from ragorder.adapters.vllm_tiers.policy import HostPolicy
from ragorder.adapters.vllm_tiers.request_state import facts_of

__all__ = ["TierManager"]

_MAX_TENANTS = 1024


class TierManager(TieringOffloadingManager):  # type: ignore[misc]
    """Manager of the tiers. Raises ValueError if the host tier's policy is not a `HostPolicy`."""

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
        """Note that stores to these host chunks that complete now have failed."""
        self._failed_chunks |= chunk_ids

    @override
    def on_new_request(
        self, req_context: ReqContext, *, exclude_tier_idx: int | None = None
    ) -> RequestOffloadingContext:
        self._count_facts(req_context)
        return super().on_new_request(req_context, exclude_tier_idx=exclude_tier_idx)

    def expect(self, req_context: ReqContext) -> None:
        """Reserve a waiting request's chunks in the host and load them from the disk, up to the room for waiting
        requests."""
        self._policy.serve(req_context)
        awaited = self._policy.expect(req_context)
        if not self.secondary_tiers:
            return
        for key in awaited:
            if self._policy.get(key) is None and super().lookup(key, req_context) is LookupResult.MISS:
                break
        # Outside a step: the next one polls again.
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
