"""Choice between the Triton kernels and torch."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ragorder.kernels.attention.table import BLOCK_SIZES, HEAD_DIMS

__all__ = ["Backend", "choose_backend"]

Backend = Literal["auto", "triton", "torch"]

_log = logging.getLogger("ragorder.kernels.attention")


def choose_backend(backend: Backend, q: Tensor, key_cache: Tensor) -> Literal["triton", "torch"]:
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
    """Return what the Triton kernel lacks, or None. Logged once on CUDA."""
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
