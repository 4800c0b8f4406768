"""Batches and placements for a machine whose memory holds neither model nor index (RAGDoll)."""

from __future__ import annotations

from ragorder.pipelining.batching.backlog import best_batch
from ragorder.pipelining.batching.budgets import Budgets
from ragorder.pipelining.batching.estimate import EstimatedCosts, Rates
from ragorder.pipelining.batching.footprint import Footprint
from ragorder.pipelining.batching.placement import Placement, Spread
from ragorder.pipelining.batching.placement_profile import PlacementProfile
from ragorder.pipelining.batching.plan import PlacementError, PlannedPlacement, plan_placement
from ragorder.pipelining.batching.power_law import PowerLaw
from ragorder.pipelining.batching.shared_tokens import shared_tokens
from ragorder.pipelining.batching.sizes import IndexSizes, ModelSizes, Workload

__all__ = [
    "Budgets",
    "EstimatedCosts",
    "Footprint",
    "IndexSizes",
    "ModelSizes",
    "Placement",
    "PlacementError",
    "PlacementProfile",
    "PlannedPlacement",
    "PowerLaw",
    "Rates",
    "Spread",
    "Workload",
    "best_batch",
    "plan_placement",
    "shared_tokens",
]
