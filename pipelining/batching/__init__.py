"""Batched retrieval and generation with limited memory (RAGDoll)."""

from __future__ import annotations

from ragorder.pipelining.batching.batchers import AllWaiting, Backlog, BacklogAware, Batcher, best_batch
from ragorder.pipelining.batching.degradation import Relief, is_shortage
from ragorder.pipelining.batching.kv import Context, KVTokens, TrieKV
from ragorder.pipelining.batching.requests import (
    AnswerChangedError,
    BatchedAnswer,
    BatchedStream,
    BatchEvent,
    RequestTrace,
)
from ragorder.pipelining.batching.retrieval import (
    BatchRetrieval,
    ConcurrentRetrieval,
    JoinableRetrieval,
    PartitionedRetrieval,
    SearchTask,
)
from ragorder.pipelining.batching.server import DecoupledServer, ServingPlacement
from ragorder.pipelining.placement.base import IndexSizes, ModelSizes, Placement, Spread, Workload
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.costs import EstimatedCosts, Footprint, Rates
from ragorder.pipelining.placement.fit import PlacementError
from ragorder.pipelining.placement.plan import PlannedPlacement, plan_placement
from ragorder.pipelining.placement.profile import PlacementProfile, shared_tokens
from ragorder.pipelining.power_law import PowerLaw

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
    "TrieKV",
    "Workload",
    "best_batch",
    "is_shortage",
    "plan_placement",
    "shared_tokens",
]
