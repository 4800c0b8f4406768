"""Searches of many callers that share their time (HedraRAG sections 4.2 to 4.4)."""

from __future__ import annotations

from ragorder.pipelining.search.continuous import ContinuousIVF
from ragorder.pipelining.search.costs import Budget
from ragorder.pipelining.search.handle import SearchHandle
from ragorder.pipelining.search.memory import MemorySplit, Throughput, split_memory
from ragorder.pipelining.search.request import History
from ragorder.pipelining.search.tiers import ClusterScan, IndexTiers

__all__ = [
    "Budget",
    "ClusterScan",
    "ContinuousIVF",
    "History",
    "IndexTiers",
    "MemorySplit",
    "SearchHandle",
    "Throughput",
    "split_memory",
]
