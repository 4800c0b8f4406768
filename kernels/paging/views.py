"""Views of a pool's KV, by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragorder.kernels.paging.shape import KVShape

__all__ = ["LayerViews"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerViews:
    """For each layer its caches (blocks, block_size, kv_heads, head_dim), and the pool's rows (.., kv_heads, head_dim)
    from that layer's first on: a token's row has the same index in each of these."""

    key_rows: list[torch.Tensor]
    value_rows: list[torch.Tensor]
    key_caches: list[torch.Tensor]
    value_caches: list[torch.Tensor]

    @classmethod
    def of(cls, kv: torch.Tensor, shape: KVShape) -> LayerViews:
        rows = kv.view(-1, shape.kv_heads, shape.head_dim)
        size, layers = shape.block_size, range(shape.layers)
        return cls(
            [rows[2 * layer * size :] for layer in layers],
            [rows[(2 * layer + 1) * size :] for layer in layers],
            [kv[:, layer, 0] for layer in layers],
            [kv[:, layer, 1] for layer in layers],
        )
