"""Entry point of attention: checks and choice of a backend."""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch
from ragorder.kernels.attention.table import BLOCK_SIZES, HEAD_DIMS
from ragorder.kernels.attention.torch_backend import torch_attention

__all__ = ["DTYPES", "Backend", "prefix_attention"]

Backend = Literal["auto", "triton", "torch"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

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
    """Attention of new tokens to their cached context and causally to themselves; returns (T, query heads, D).

    - `q` (T, query heads, D), `k`, `v` (T, KV heads, D): rotated, packed as in `batch`.
    - `key_cache`, `value_cache`: (blocks, block size, KV heads, D), last stride 1.
    - `scale`: default 1 / sqrt(D). `window`: positions seen, itself included. `softcap`: by tanh (Gemma 2).
    - `backend` "auto": Triton on CUDA from 8.0, else torch, and for shapes without a configuration (logged once).

    No gradients. Raises ValueError naming what is not supported.
    """
    _check(q, k, v, key_cache, value_cache, batch)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    for name, number in (("scale", scale), ("window", window), ("softcap", softcap)):
        if number is not None and not 0 < number < math.inf:
            raise ValueError(f"{name} is {number}: give a positive number, or None")
    if not q.numel():
        return torch.empty_like(q)
    if _choose(backend, q, key_cache) == "torch":
        return torch_attention(q, k, v, key_cache, value_cache, batch, scale, window, softcap)

    from ragorder.kernels.attention.launch import triton_attention

    return triton_attention(q, k, v, key_cache, value_cache, batch, scale, window, softcap)


def _check(q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, batch: PackedBatch) -> None:
    named = {"q": q, "k": k, "v": v, "key_cache": key_cache, "value_cache": value_cache}
    if q.dtype not in DTYPES:
        raise ValueError(f"{q.dtype} is not supported: give one of {', '.join(map(str, DTYPES))}")
    for name, tensor in named.items():
        if tensor.dim() != (4 if name.endswith("cache") else 3):
            raise ValueError(f"{name} has {tensor.dim()} dimensions: see prefix_attention's documentation")
        if tensor.dtype is not q.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, q is {q.dtype}: give one dtype")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device}, q on {q.device}: give all on one device")
        if tensor.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous")
    if batch.query_starts.device != q.device:
        raise ValueError(f"batch is on {batch.query_starts.device}, q on {q.device}: give all on one device")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together")
    if key_cache.shape != value_cache.shape or key_cache.shape[2:] != k.shape[1:]:
        raise ValueError(
            f"key_cache {tuple(key_cache.shape)} and value_cache {tuple(value_cache.shape)} must be"
            f" (blocks, block size, {k.shape[1]}, {k.shape[2]})"
        )
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads evenly")
    if batch.block_tables.shape[1] * key_cache.shape[1] < batch.longest_context:
        raise ValueError(
            f"block_tables has {batch.block_tables.shape[1]} blocks of {key_cache.shape[1]} tokens: too few for a"
            f" context of {batch.longest_context}"
        )


def _choose(backend: str, q: Tensor, key_cache: Tensor) -> str:
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"there is no backend {backend!r}: give auto, triton or torch")
    if backend == "torch" or (backend == "auto" and not q.is_cuda):
        return "torch"
    lacking = _lacking(q.device, q.shape[2], key_cache.shape[1])
    if lacking is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"the Triton kernel {lacking}: give backend='torch', or 'auto'")
    return "torch"


@lru_cache
def _lacking(device: torch.device, head_dim: int, block_size: int) -> str | None:
    """What the Triton kernel lacks; None if it can run. Logged once on CUDA."""
    lacking = None
    if head_dim not in HEAD_DIMS:
        lacking = f"has no head dim {head_dim}, only {', '.join(map(str, HEAD_DIMS))}"
    elif block_size not in BLOCK_SIZES:
        lacking = f"has no block size {block_size}, only multiples of 16 up to {BLOCK_SIZES[-1]}"
    elif find_spec("triton") is None:
        lacking = "needs triton: pip install 'ragorder[triton]'"
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
