"""Decoupled batches on ordered prompts, and their metrics."""

from __future__ import annotations

from ragorder.adapters.batching.metrics import BatchingMetrics
from ragorder.adapters.batching.server import ordered_batches

__all__ = ["BatchingMetrics", "ordered_batches"]
