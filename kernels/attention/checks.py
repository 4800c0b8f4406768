"""Checks of the arguments of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch

__all__ = ["DTYPES", "check_caches", "check_numbers", "check_tensors"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_tensors(named: Mapping[str, Tensor], batch: PackedBatch) -> None:
    """Check dtypes and devices against `q`, and dimensions: 4 for names that end in "cache", else 3."""
    q = named["q"]
    if q.dtype not in DTYPES:
        raise ValueError(f"{q.dtype} is not supported: give one of {', '.join(map(str, DTYPES))}")
    for name, tensor in named.items():
        wanted = 4 if name.endswith("cache") else 3
        if tensor.dim() != wanted:
            raise ValueError(f"{name} has {tensor.dim()} dimensions: give {wanted}")
        if tensor.dtype is not q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, q is {q.dtype}: give one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: give all on one device")
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")
    if batch.query_starts.device != q.device:
        raise ValueError(f"batch is on {batch.query_starts.device}, q on {q.device}: give all on one device")


def check_caches(q: Tensor, kv_heads: int, key_cache: Tensor, value_cache: Tensor, batch: PackedBatch) -> None:
    if key_cache.shape != value_cache.shape or key_cache.shape[2:] != (kv_heads, q.shape[2]):
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must be"
            f" (blocks, block size, {kv_heads}, {q.shape[2]})"
        )
    if not kv_heads or q.shape[1] % kv_heads:
        raise ValueError(f"{q.shape[1]} query heads cannot share {kv_heads} KV heads evenly")
    if batch.block_tables.shape[1] * key_cache.shape[1] < batch.longest_context:
        raise ValueError(
            f"block_tables has {batch.block_tables.shape[1]} blocks of {key_cache.shape[1]} tokens: too few for a"
            f" context of {batch.longest_context}"
        )


def check_numbers(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} is {number}: give a positive number, or None")
