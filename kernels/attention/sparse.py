"""Attention of rows at any positions over a paged cache (FusionRAG's Q-Sparse-Attn, section 4.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal, overload

import torch
from torch import Tensor

from ragorder.kernels.attention.backends import Backend, choose_backend
from ragorder.kernels.attention.batch import PackedBatch
from ragorder.kernels.attention.checks import check_caches, check_numbers, check_tensors
from ragorder.kernels.attention.ranges import Ranges
from ragorder.kernels.attention.sparse_torch import torch_sparse_attention

__all__ = ["merge_attention", "sparse_attention"]


@overload
def sparse_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    positions: Tensor,
    *,
    low: Tensor | None = ...,
    high: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    lse: Literal[False] = ...,
    backend: Backend = ...,
) -> Tensor: ...


@overload
def sparse_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    positions: Tensor,
    *,
    low: Tensor | None = ...,
    high: Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    lse: Literal[True],
    backend: Backend = ...,
) -> tuple[Tensor, Tensor]: ...


def sparse_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    positions: Tensor,
    *,
    low: Tensor | None = None,
    high: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    lse: bool = False,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the attention (T, query heads, D) of rows at any positions to ranges of their requests' keys.

    - `q` (T, query heads, D): rotated, packed as in `batch`; fastest with ascending positions per request.
    - `key_cache`, `value_cache`: (blocks, block size, KV heads, D), last stride 1, already with the rows' own keys.
      `batch.context_lengths` count every key of a request.
    - `positions` int32 (T,). Row t attends to keys from `low[t]` to before `high[t]`, int32 (T,); by default from 0 to
      its own position. Keys before a request's greatest `high` must have been written.
    - `lse`: also return each row's log-sum-exp, float32 (T, query heads). A row without keys has 0 and -inf.
    - `scale`, `softcap`, `backend`: as in `prefix_attention`. There are no windows.

    Pass the same `positions`, `low` and `high` objects to all layers of a step: `batch` caches values derived from
    them. No gradients. Raises ValueError for unsupported arguments.
    """
    check_tensors({"q": q, "key_cache": key_cache, "value_cache": value_cache}, batch)
    check_caches(q, key_cache.shape[2], key_cache, value_cache, batch)
    check_numbers(scale=scale, softcap=softcap)
    for name, tensor in (("positions", positions), ("low", low), ("high", high)):
        if tensor is not None and (tensor.dtype is not torch.int32 or tensor.shape != q.shape[:1]):
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: give torch.int32 ({len(q)},)")
        if tensor is not None and tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: give all on one device")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    chosen = choose_backend(backend, q, key_cache)
    if not q.numel():
        empty = torch.empty_like(q)
        return (empty, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)) if lse else empty
    ranges = Ranges.of(batch, positions, low, high)
    if chosen == "torch":
        found, weight = torch_sparse_attention(q, key_cache, value_cache, batch, ranges, scale, softcap, lse)
    else:
        from ragorder.kernels.attention.launch import triton_sparse_attention

        found, weight = triton_sparse_attention(q, key_cache, value_cache, batch, ranges, scale, softcap, lse)
    return found if weight is None else (found, weight)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Return the attention over the union of disjoint key ranges.

    `outs` (T, query heads, D) and `lses` (T, query heads) are `sparse_attention`'s results per range. A row without
    keys gets 0.
    """
    weights = torch.stack(tuple(lses))
    top = weights.amax(0)
    weights = (weights - top.masked_fill(top == -math.inf, 0)).exp()
    total = weights.sum(0)
    weights /= total.masked_fill(total == 0, 1)
    merged: Tensor = reduce(
        torch.add, (out.float() * weight[..., None] for out, weight in zip(outs, weights, strict=True))
    )
    return merged.to(outs[0].dtype)
