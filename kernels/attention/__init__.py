"""Attention of new tokens to a paged prefix and to themselves, in Triton and in torch."""

from __future__ import annotations

try:
    from ragorder.kernels.attention.attention import prefix_attention
    from ragorder.kernels.attention.batch import PackedBatch
except ModuleNotFoundError as error:
    raise ImportError(f"attention needs {error.name}: pip install 'ragorder[torch]'", name=error.name) from error

__all__ = ["PackedBatch", "prefix_attention"]
