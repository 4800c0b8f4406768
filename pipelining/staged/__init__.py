"""Vector searches in stages with provisional results (RAGCache 5.3)."""

from __future__ import annotations

from ragorder.pipelining.staged.base import Stage, StagedSearch
from ragorder.pipelining.staged.hnsw import StagedHNSW
from ragorder.pipelining.staged.ivf import StagedIVF

__all__ = ["Stage", "StagedHNSW", "StagedIVF", "StagedSearch"]
