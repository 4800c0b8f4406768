"""Replacement policies on simulated tiers (RAGCache 7.3 and 7.4), and scheduling times (7.5)."""

from ragorder.benchmarks.ragcache.replacement.bound import most_hits
from ragorder.benchmarks.ragcache.replacement.cells import KIB_PER_TOKEN, TierSize
from ragorder.benchmarks.ragcache.replacement.following import EventsOrderer
from ragorder.benchmarks.ragcache.replacement.simulate import (
    HISTORY,
    HISTORY_NODES,
    REPLACEMENT_POLICIES,
    Simulated,
    mirroring_orderer,
    simulate,
)
from ragorder.benchmarks.ragcache.replacement.streams import SKEWED, DocumentStream, skewed_stream, stream_of_trace
from ragorder.benchmarks.ragcache.replacement.tiers import (
    A10G,
    QUESTION_TOKENS,
    SYSTEM_TOKENS,
    SimulatedPrefill,
    Traffic,
    TwoTiers,
)

__all__ = [
    "A10G",
    "HISTORY",
    "HISTORY_NODES",
    "KIB_PER_TOKEN",
    "QUESTION_TOKENS",
    "REPLACEMENT_POLICIES",
    "SKEWED",
    "SYSTEM_TOKENS",
    "DocumentStream",
    "EventsOrderer",
    "Simulated",
    "SimulatedPrefill",
    "TierSize",
    "Traffic",
    "TwoTiers",
    "mirroring_orderer",
    "most_hits",
    "simulate",
    "skewed_stream",
    "stream_of_trace",
]
