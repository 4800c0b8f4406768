"""Shapes of problems, and their tensors in the engine's layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ragorder.kernels.attention import PackedBatch

__all__ = ["AttentionProblem", "AttentionShape", "make_problem"]

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Equal requests, each of `query` new tokens behind `context` cached ones, or `scattered` evenly in the place of
    some of these."""

    batch: int
    query: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    scattered: bool = False

    @property
    def total(self) -> int:
        """Tokens of a request."""
        return self.context if self.scattered else self.context + self.query

    @property
    def positions(self) -> list[int]:
        """Of a request's new tokens, the last of which is at its end."""
        if not self.scattered:
            return list(range(self.context, self.total))
        return [(place + 1) * self.total // self.query - 1 for place in range(self.query)]

    @property
    def flops(self) -> int:
        """Those that the causal mask leaves."""
        pairs = sum(self.positions) + self.query
        return 4 * self.head_dim * self.heads * self.batch * pairs

    @property
    def bytes(self) -> int:
        """Moved at least: keys and values once, queries in, results out."""
        keys = 2 * self.total * self.kv_heads
        itemsize: int = _DTYPES[self.dtype].itemsize
        return self.batch * (keys + 2 * self.query * self.heads) * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """New tokens, packed, and a cache with its blocks in random order."""

    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PackedBatch
    positions: Tensor
    """int32 (tokens,)."""

    def gather(self) -> tuple[Tensor, Tensor]:
        """Keys and values in one piece, (batch, KV heads, total, D), by one copy."""
        key, value = (
            cache[self.batch.block_tables.long()].flatten(1, 2)[:, : self.shape.total].transpose(1, 2)
            for cache in (self.key_cache, self.value_cache)
        )
        return key, value

    def seen(self) -> Tensor:
        """Which keys each of a request's rows sees, bool (query, total)."""
        own = self.positions[: self.shape.query]
        return torch.arange(self.shape.total, device=own.device) <= own[:, None]

    def queries(self) -> Tensor:
        """(batch, query heads, query, D)."""
        return self.q.view(self.shape.batch, self.shape.query, *self.q.shape[1:]).transpose(1, 2)


def make_problem(shape: AttentionShape, device: torch.device, seed: int) -> AttentionProblem:
    rng = torch.Generator(device).manual_seed(seed)
    dtype = _DTYPES[shape.dtype]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng, device=device, dtype=torch.float32).to(dtype)

    tokens = shape.batch * shape.query
    needed = -(-shape.total // shape.block_size)
    blocks = shape.batch * needed
    # One layer of the engine's pool: a block's keys and values lie side by side.
    pool = torch.empty(blocks, 2, shape.block_size, shape.kv_heads, shape.head_dim, device=device, dtype=dtype)
    for block in range(0, blocks, 1024):
        pool[block : block + 1024] = normal(*pool[block : block + 1024].shape)
    tables = torch.randperm(blocks, generator=rng, device=device).int().view(shape.batch, needed)
    batch = PackedBatch(
        torch.arange(0, tokens + 1, shape.query, dtype=torch.int32, device=device),
        torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device),
        tables,
        shape.query,
        shape.context,
    )
    q = normal(tokens, shape.heads, shape.head_dim)
    k, v = (normal(tokens, shape.kv_heads, shape.head_dim) for _ in range(2))
    places = torch.tensor(shape.positions, device=device)
    written = tables[:, places // shape.block_size].long()
    for cache, new in ((pool[:, 0], k), (pool[:, 1], v)):
        cache[written, places % shape.block_size] = new.view(shape.batch, shape.query, *new.shape[1:])
    positions = places.int().repeat(shape.batch)
    return AttentionProblem(shape, q, k, v, pool[:, 0], pool[:, 1], batch, positions)
