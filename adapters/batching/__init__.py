"""Decoupled batches on ordered prompts: a server for any engine, and its metrics."""

from __future__ import annotations

from ragorder.adapters.batching.metrics import BatchingMetrics
from ragorder.adapters.batching.server import ordered_batches

__all__ = ["BatchingMetrics", "ordered_batches"]
