"""Batches for a machine whose memory holds neither model nor index (RAGDoll)."""

from __future__ import annotations

from ragorder.pipelining.batching.backlog import best_batch
from ragorder.pipelining.batching.power_law import PowerLaw

__all__ = ["PowerLaw", "best_batch"]
