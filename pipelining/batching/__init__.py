"""Batches and placements for a machine whose memory holds neither model nor index (RAGDoll)."""

from __future__ import annotations

from ragorder.pipelining.batching.backlog import best_batch
from ragorder.pipelining.batching.batchers import AllWaiting, Backlog, BacklogAware, Batcher, StaticBatch
from ragorder.pipelining.batching.budgets import Budgets
from ragorder.pipelining.batching.degradation import Relief, is_shortage
from ragorder.pipelining.batching.estimate import EstimatedCosts, Rates
from ragorder.pipelining.batching.footprint import Footprint
from ragorder.pipelining.batching.kv import Context, KVTokens, TrieKV
from ragorder.pipelining.batching.placement_profile import PlacementProfile
from ragorder.pipelining.batching.plan import PlacementError, PlannedPlacement, plan_placement
from ragorder.pipelining.batching.power_law import PowerLaw
from ragorder.pipelining.batching.requests import AnswerChangedError, BatchedAnswer
from ragorder.pipelining.batching.retrieval import (
    BatchRetrieval,
    ConcurrentRetrieval,
    JoinableRetrieval,
    PartitionedRetrieval,
    SearchTask,
)
from ragorder.pipelining.batching.server import DecoupledServer, ServingPlacement
from ragorder.pipelining.batching.shared_tokens import shared_tokens
from ragorder.pipelining.batching.stream import BatchedStream
from ragorder.pipelining.batching.trace import BatchEvent, RequestTrace
from ragorder.pipelining.placement import IndexSizes, ModelSizes, Placement, Spread, Workload

__all__ = [
    "AllWaiting",
    "AnswerChangedError",
    "Backlog",
    "BacklogAware",
    "BatchEvent",
    "BatchRetrieval",
    "BatchedAnswer",
    "BatchedStream",
    "Batcher",
    "Budgets",
    "ConcurrentRetrieval",
    "Context",
    "DecoupledServer",
    "EstimatedCosts",
    "Footprint",
    "IndexSizes",
    "JoinableRetrieval",
    "KVTokens",
    "ModelSizes",
    "PartitionedRetrieval",
    "Placement",
    "PlacementError",
    "PlacementProfile",
    "PlannedPlacement",
    "PowerLaw",
    "Rates",
    "Relief",
    "RequestTrace",
    "SearchTask",
    "ServingPlacement",
    "Spread",
    "StaticBatch",
    "TrieKV",
    "Workload",
    "best_batch",
    "is_shortage",
    "plan_placement",
    "shared_tokens",
]
