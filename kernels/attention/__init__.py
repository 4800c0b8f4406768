"""Attention over a paged cache, in Triton and in torch."""

from __future__ import annotations

from ragorder.common.extras import install_hint

try:
    from ragorder.kernels.attention.attention import prefix_attention, sparse_attention
    from ragorder.kernels.attention.batch import PackedBatch
except ModuleNotFoundError as error:
    raise ImportError(f"attention needs {error.name}: {install_hint('torch')}", name=error.name) from error

__all__ = ["PackedBatch", "prefix_attention", "sparse_attention"]
