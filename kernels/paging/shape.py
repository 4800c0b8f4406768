"""Shape of KV blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KVShape"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """`head_dim` numbers of key and value for each layer, KV head and token; `block_size` tokens are a block.

    Raises ValueError for a number below 1.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 1 or more")

    @property
    def token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def covering(self, start: int, tokens: int) -> range:
        """A sequence's blocks of `tokens` tokens (1 or more) from `start` on."""
        return range(start // self.block_size, (start + tokens - 1) // self.block_size + 1)
