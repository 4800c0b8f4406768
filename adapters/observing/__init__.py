"""Metrics, spans and statistics of orderers and servers' tiers."""

from ragorder.adapters.observing.observed import Observation, ObservedOrderer, Watcher
from ragorder.adapters.observing.opentelemetry import Tracing
from ragorder.adapters.observing.prometheus import Metrics
from ragorder.adapters.observing.stats import Stats, fetch_stats
from ragorder.adapters.observing.tier_stats import TierStats, fetch_tier_stats

__all__ = [
    "Metrics",
    "Observation",
    "ObservedOrderer",
    "Stats",
    "TierStats",
    "Tracing",
    "Watcher",
    "fetch_stats",
    "fetch_tier_stats",
]
