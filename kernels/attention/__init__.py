"""Attention over a paged cache, in Triton and in torch."""

from __future__ import annotations

from ragorder.common.extras import needs

with needs("torch", "attention"):
    from ragorder.kernels.attention.attention import prefix_attention, sparse_attention
    from ragorder.kernels.attention.batch import PackedBatch

__all__ = ["PackedBatch", "prefix_attention", "sparse_attention"]
