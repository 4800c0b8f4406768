"""Attention of new tokens to a paged prefix and to themselves."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragorder.kernels.attention.backends import Backend, choose_backend
from ragorder.kernels.attention.batch import PackedBatch
from ragorder.kernels.attention.checks import check_caches, check_numbers, check_tensors
from ragorder.kernels.attention.torch_backend import torch_attention

__all__ = ["prefix_attention"]


def prefix_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the attention (T, query heads, D) of new tokens to their cached context and causally to themselves.

    - `q` (T, query heads, D), `k`, `v` (T, KV heads, D): rotated, packed as in `batch`.
    - `key_cache`, `value_cache`: (blocks, block size, KV heads, D), last stride 1.
    - `scale`: 1 / sqrt(D) by default. `window`: visible positions, its own included. `softcap`: by tanh (Gemma 2).
    - `backend` "auto": Triton on CUDA from 8.0, else torch, also for unsupported shapes (logged once).

    No gradients. Raises ValueError for unsupported arguments.
    """
    check_tensors({"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}, batch)
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} have shapes that do not match")
    check_caches(q, k.shape[1], key_cache, value_cache, batch)
    check_numbers(scale=scale, window=window, softcap=softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not q.numel():
        return torch.empty_like(q)
    if choose_backend(backend, q, key_cache) == "torch":
        return torch_attention(q, k, v, key_cache, value_cache, batch, scale, window, softcap)

    from ragorder.kernels.attention.launch import triton_attention

    return triton_attention(q, k, v, key_cache, value_cache, batch, scale, window, softcap)
