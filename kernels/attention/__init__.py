"""Attention of new tokens to a prefix whose KV lies in blocks, and to themselves: a Triton kernel, and torch."""

from __future__ import annotations

from ragorder.kernels.attention.attention import prefix_attention
from ragorder.kernels.attention.batch import PackedBatch

__all__ = ["PackedBatch", "prefix_attention"]
