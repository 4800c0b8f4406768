"""Tier connector with vLLM's device blocks evicted by our policy."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from ragorder.adapters.request_facts import RequestFacts
from ragorder.adapters.vllm_tiers.awaited_profile import prefill_costs
from ragorder.adapters.vllm_tiers.connector import RecomputesFailedLoads
from ragorder.adapters.vllm_tiers.device_order import DeviceOrder
from ragorder.adapters.vllm_tiers.metrics import DEVICE_ORDER, TierCounts
from ragorder.adapters.vllm_tiers.policy import ReadFacts
from ragorder.adapters.vllm_tiers.settings import TierSettings
from ragorder.trie.policies import History, Tier, make_policy

_logger = logging.getLogger("ragorder")


def order_device(pool: Any, groups: int, settings: TierSettings) -> DeviceOrder | None:
    """Return None, with a warning, without prefix caching or for several `groups` of KV caches."""
    if groups > 1:
        _logger.warning("the device's blocks stay in vLLM's own order: the model has %d groups of KV caches", groups)
        return None
    if not pool.enable_caching:
        _logger.warning("the device's blocks stay in vLLM's own order: prefix caching is off")
        return None
    history = History(settings.history) if settings.history else None
    return DeviceOrder(pool, Tier(make_policy(settings.policy), history))


class DeviceOrderConnector(OffloadingConnector):  # type: ignore[misc]
    """Connector with ordered device blocks. Requests count once, when finished."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra_config = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._tier_settings = TierSettings.from_extra_config(extra_config)
        self._profile = prefill_costs(self._tier_settings, extra_config)
        self._block_bytes = _block_bytes(kv_cache_config) * vllm_config.parallel_config.world_size
        self._device = TierCounts("device")
        self._cached_tokens: dict[str, int] = {}
        self.device_order: DeviceOrder | None = None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        super().bind_gpu_block_pool(gpu_block_pool)
        groups = len(self._kv_cache_config.kv_cache_groups)
        self.device_order = order_device(gpu_block_pool, groups, self._tier_settings)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        # After a preemption a request finds the blocks that it has computed itself.
        if self.device_order is not None and not request.num_preemptions:
            loaded = 0 if request.skip_reading_prefix_cache else found[0] or 0
            self._cached_tokens[request.request_id] = num_computed_tokens + loaded
        return found

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._learn(request, block_ids)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> Any:
        self._learn(request, *block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        order = self.device_order
        if order is None:
            return stats
        counts = self._device
        counts.chunks, counts.stored, counts.evicted = order.cached, order.stored, order.evicted
        counts.bytes = order.cached * self._block_bytes
        counts.capacity_bytes = order.capacity * self._block_bytes
        counts.oldest_seconds = order.oldest_seconds
        report = counts.report()
        report.set_gauge(DEVICE_ORDER, 0 if order.failures else 1)
        return report if stats is None else stats.aggregate(report)

    def _learn(self, request: Any, block_ids: Sequence[int] = (), *others: Sequence[int]) -> None:
        order = self.device_order
        if order is None or others:
            return
        cached_tokens = self._cached_tokens.pop(request.request_id, 0)
        # The host tier counts unreadable ones.
        facts = ReadFacts.of(request.kv_transfer_params).facts or RequestFacts()
        facts = facts.of_first(self._tier_settings.max_cached_documents)
        cost = facts.cost
        if cost is None:
            cost = self._profile.cost(cached_tokens, request.num_prompt_tokens - cached_tokens)
        order.finished(block_ids, cached_tokens, cost, facts)


def _block_bytes(kv_cache_config: Any) -> int:
    """Return a block's bytes in all layers: each tensor has the size of the whole allocation."""
    tensors = kv_cache_config.kv_cache_tensors
    return int(tensors[0].size) // int(kv_cache_config.num_blocks) if tensors and kv_cache_config.num_blocks else 0


class OrderedTierConnector(RecomputesFailedLoads, DeviceOrderConnector): ...
