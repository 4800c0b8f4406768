"""Tier connector with ordered device blocks."""

from __future__ import annotations

from ragorder.adapters.vllm_tiers.connector import RecomputesFailedLoads
from ragorder.adapters.vllm_tiers.device import DeviceOrderConnector

__all__ = ["OrderedTierConnector"]


class OrderedTierConnector(RecomputesFailedLoads, DeviceOrderConnector):
    """Host and disk tiers, with the device's blocks in the order of the policy."""
