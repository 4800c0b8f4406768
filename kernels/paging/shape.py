"""What the KV of a token looks like, and how much of it is a block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["KVShape"]


@dataclass(frozen=True, slots=True)
class KVShape:
    """`layers` layers, in each of them a key and a value of `head_dim` numbers for each of `kv_heads` heads and each
    token; `block_size` tokens are a block.

    Raises ValueError if one of these is below 1.
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
        """What a token takes in all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold the first `tokens` tokens."""
        return -(-tokens // self.block_size)

    def covering(self, start: int, tokens: int) -> range:
        """Which blocks of a sequence hold `tokens` tokens (1 or more) from position `start` on."""
        return range(start // self.block_size, (start + tokens - 1) // self.block_size + 1)
