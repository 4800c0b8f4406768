"""Whose KV it is: what must be the same for KV on a disk to be this model's."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

from ragorder.kernels.engine.support import text_config
from ragorder.kernels.paging import KVShape

__all__ = ["identity"]

_FORMAT = 1
_SAMPLES = 1024
# What a configuration says about files, software and generation, but not about KV.
_BESIDE = frozenset(
    {
        "_attn_implementation",
        "_experts_implementation",
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def identity(model: Any, shape: KVShape) -> str:
    """A digest of configuration, KV layout and weights. Of each parameter and buffer the name, the shape and values at
    even distances count, not all values: reading a model twice would double what loading it takes."""
    digest = hashlib.sha256()
    config = text_config(model).to_dict()
    facts = {
        "format": _FORMAT,
        "config": {key: value for key, value in config.items() if key not in _BESIDE},
        "kv": [shape.layers, shape.kv_heads, shape.head_dim, shape.block_size, str(shape.dtype)],
    }
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    named = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0])
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_sampled(tensor))
    return digest.hexdigest()


def _sampled(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    sample: torch.Tensor = flat[::step].contiguous().cpu()
    return bytes(sample.view(torch.uint8).numpy().tobytes())
