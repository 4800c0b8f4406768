"""The same with the device's own order."""

from __future__ import annotations

from ragorder.adapters.vllm_tiers.connector import RecomputesFailedLoads
from ragorder.adapters.vllm_tiers.device import DeviceOrderConnector

__all__ = ["OrderedTierConnector"]


class OrderedTierConnector(RecomputesFailedLoads, DeviceOrderConnector):
    """Host and disk behind a device that gives up blocks in the order of the policy."""
