"""Probes of a model: shapes, windows, agreement with eager attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ragorder.kernels.models.attention import IMPLEMENTATION, AttentionCall
from ragorder.kernels.models.batch import Forward, Piece, pack
from ragorder.kernels.models.support import UnsupportedModelError, text_config
from ragorder.kernels.paging import BlockPool, KVShape

__all__ = ["observe", "verify"]

_logger = logging.getLogger("ragorder.kernels.engine")

# Relative difference of the logits' norms: far below that of wrong masks or positions, far above rounding.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


class _Observer:
    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int, int, torch.dtype]] = {}
        self.windows: dict[int, int | None] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, scale, window, _ = call
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} attends more than once in a forward")
        self.shapes[layer] = (query.shape[1], key.shape[1], key.shape[2], value.shape[2], key.dtype)
        self.windows[layer] = window
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def observe(model: Any, forward: Forward) -> AttentionShape:
    """Measure shapes in a run of two tokens. Raises UnsupportedModelError if layers differ, do not attend, or
    contradict the configured windows."""
    name = type(model).__name__
    observer = _Observer()
    ids = _tokens(model, 2)
    try:
        forward(ids, torch.arange(2, device=ids.device), torch.tensor([1], device=ids.device), observer)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served exactly: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot be served: its forward does not take a packed step ({type(error).__name__}: {error})"
        ) from error
    config = text_config(model)
    wanted = getattr(config, "num_hidden_layers", len(observer.shapes))
    if sorted(observer.shapes) != list(range(wanted)):
        raise UnsupportedModelError(
            f"{name} cannot be served exactly: {len(observer.shapes)} of its {wanted} layers attend through "
            "transformers' AttentionInterface, so the others keep a state outside the engine"
        )
    shapes = set(observer.shapes.values())
    if len(shapes) > 1:
        raise UnsupportedModelError(f"{name} cannot be served: the shapes of heads differ between its layers")
    heads, kv_heads, head_dim, value_dim, dtype = shapes.pop()
    if head_dim != value_dim:
        raise UnsupportedModelError(
            f"{name} cannot be served: its keys have {head_dim} dimensions a head, its values {value_dim}"
        )
    if dtype not in _TOLERANCE:
        raise UnsupportedModelError(f"{name} cannot be served: KV of {dtype}; load it as float32, bfloat16 or float16")
    _check_windows(name, config, observer.windows)
    return AttentionShape(wanted, heads, kv_heads, head_dim, dtype)


def _check_windows(name: str, config: Any, windows: dict[int, int | None]) -> None:
    # transformers passes windows in masks, which are not used here, and to the attention.
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    for layer, told in windows.items():
        sliding = types[layer] == "sliding_attention" if types else window is not None
        if told != (window if sliding else None):
            raise UnsupportedModelError(
                f"{name} cannot be served exactly: layer {layer} uses a window of {told} tokens, but its "
                f"configuration has {window if sliding else None}"
            )


def verify(model: Any, forward: Forward, observed: AttentionShape, block_size: int, longest: int | None) -> None:
    """Compare with eager attention on a prompt split inside a block. Raises UnsupportedModelError."""
    length = min(2 * block_size + block_size // 2 + 3, 96, longest or 96)
    first = max(1, length - block_size // 2 - 2)
    ids = _tokens(model, length)
    shape = KVShape(observed.layers, observed.kv_heads, observed.head_dim, block_size, observed.dtype)
    blocks = shape.blocks_for(length)
    pool = BlockPool(shape, blocks, ids.device)
    table = pool.allocate(blocks)
    numbers = ids.tolist()
    for start, end in ((0, first), (first, length)):
        if start == end:
            continue
        ours = forward(*pack([Piece(numbers[start:end], start, table, True)], pool))
    pool.release(table)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            eager = model(input_ids=ids[None], use_cache=False).logits[0, -1:]
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    eager = eager.float()
    difference = ((ours.float() - eager).norm() / eager.norm().clamp_min(1e-12)).item()
    _logger.debug("%s: the engine's logits differ from eager attention's by %.2e", type(model).__name__, difference)
    if not difference <= _TOLERANCE[observed.dtype]:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served exactly: over a cached prefix the logits differ from those of "
            f"transformers' eager attention by {difference:.1e} of their norm (allowed: {_TOLERANCE[observed.dtype]:g})"
        )


def _tokens(model: Any, count: int) -> torch.Tensor:
    embedding = model.get_input_embeddings().weight
    drawn = torch.randint(0, embedding.shape[0], (count,), generator=torch.Generator().manual_seed(count))
    return drawn.to(embedding.device)
