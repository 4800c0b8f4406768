"""Attention with checks and a choice of backend."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, Ranges
from ragorder.kernels.attention.runs import QueryTurn, Runs
from ragorder.kernels.attention.table import BLOCK_SIZES, HEAD_DIMS
from ragorder.kernels.attention.torch_backend import Rule, torch_attention, torch_sparse_attention
from ragorder.kernels.attention.torch_runs import torch_run_attention

Backend = Literal["auto", "triton", "torch"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_log = logging.getLogger("ragorder.kernels.attention")


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
    """Return new tokens' attention (T, query heads, D) to their cached context and causally to themselves.

    - `q` (T, query heads, D), `k`, `v` (T, KV heads, D): rotated, packed as in `batch`.
    - `key_cache`, `value_cache`: (blocks, block size, KV heads, D), last stride 1.
    - `scale`: 1 / sqrt(D) by default. `window`: visible positions, its own included. `softcap`: by tanh (Gemma 2).
    - `backend` "auto": Triton for supported shapes on CUDA from 8.0, else torch.
    """
    _check_tensors({"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}, batch)
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} have shapes that do not match")
    _check_caches(q, k.shape[1], key_cache, value_cache, batch)
    _check_numbers(scale=scale, window=window, softcap=softcap)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not q.numel():
        return torch.empty_like(q)
    if choose_backend(backend, q, key_cache.shape[1]) == "torch":
        return torch_attention(q, k, v, (key_cache, value_cache), batch, Rule(scale, window, softcap))

    from ragorder.kernels.attention.launch import triton_attention

    return triton_attention(q, k, v, key_cache, value_cache, batch, scale, window, softcap)


def sparse_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    positions: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    runs: Runs | None = None,
    turn: QueryTurn | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Return the attention of rows at any positions to their requests' keys (FusionRAG's Q-Sparse-Attn, 4.3).

    As `prefix_attention`, without windows. The caches and `batch.context_lengths` include the rows' own keys; row t
    attends to keys up to `positions[t]`, int32 (T,). All layers of a step must give the same `positions` object:
    `batch` caches by it. With `runs`, of the same `Runs.pack` as `batch`, blocks are rows, and `turn` rotates each
    run's queries.
    """
    _check_tensors({"q": q, "key_cache": key_cache, "value_cache": value_cache}, batch)
    _check_caches(q, key_cache.shape[2], key_cache, value_cache, batch)
    _check_numbers(scale=scale, softcap=softcap)
    if positions.dtype is not torch.int32 or positions.shape != q.shape[:1]:
        raise ValueError(f"positions is {positions.dtype} {tuple(positions.shape)}: give torch.int32 ({len(q)},)")
    if positions.device != q.device:
        raise ValueError(f"positions is on {positions.device}, q on {q.device}: give all on one device")
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    # Rows are read one by one, as in blocks of any size.
    chosen = choose_backend(backend, q, key_cache.shape[1] if runs is None else BLOCK_SIZES[0])
    if not q.numel():
        return torch.empty_like(q)
    ranges, rule = Ranges.of(batch, positions), Rule(scale, None, softcap)
    if chosen == "torch" and runs is not None:
        return torch_run_attention(q, (key_cache, value_cache), batch, ranges, runs, turn, rule)
    if chosen == "torch":
        return torch_sparse_attention(q, (key_cache, value_cache), batch, ranges, rule)

    from ragorder.kernels.attention.launch import triton_sparse_attention

    return triton_sparse_attention(q, key_cache, value_cache, batch, ranges, scale, softcap, runs, turn)


def choose_backend(backend: Backend, q: Tensor, block_size: int) -> Literal["triton", "torch"]:
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"there is no backend {backend!r}: give auto, triton or torch")
    if backend == "torch" or (backend == "auto" and not q.is_cuda):
        return "torch"
    lacking = _lacking(q.device, q.shape[2], block_size)
    if lacking is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"the Triton kernel {lacking}: give backend='torch', or 'auto'")
    return "torch"


@lru_cache
def _lacking(device: torch.device, head_dim: int, block_size: int) -> str | None:
    lacking = None
    if head_dim not in HEAD_DIMS:
        lacking = f"has no head dim {head_dim}, only {', '.join(map(str, HEAD_DIMS))}"
    elif block_size not in BLOCK_SIZES:
        lacking = f"has no block size {block_size}, only multiples of 16 up to {BLOCK_SIZES[-1]}"
    elif find_spec("triton") is None:
        lacking = "needs triton, which a torch for CUDA brings: pip install triton"
    elif device.type == "cpu":
        from ragorder.kernels.attention.launch import INTERPRETED

        if not INTERPRETED:
            lacking = "needs a GPU, or its interpreter: TRITON_INTERPRET=1 before triton is imported"
    elif device.type != "cuda" or torch.version.cuda is None:
        lacking = "runs on NVIDIA GPUs only"
    elif (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        lacking = f"needs compute capability 8.0 or more, and {device} has {'.'.join(map(str, capability))}"
    if lacking is not None and device.type == "cuda":
        _log.warning("attention on %s runs in torch, slower: the Triton kernel %s", device, lacking)
    return lacking


def _check_tensors(named: Mapping[str, Tensor], batch: PackedBatch) -> None:
    q = named["q"]
    if q.dtype not in _DTYPES:
        raise ValueError(f"{q.dtype} is not supported: give one of {', '.join(map(str, _DTYPES))}")
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


def _check_caches(q: Tensor, kv_heads: int, key_cache: Tensor, value_cache: Tensor, batch: PackedBatch) -> None:
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


def _check_numbers(**numbers: float | None) -> None:
    for name, number in numbers.items():
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} is {number}: give a positive number, or None")
