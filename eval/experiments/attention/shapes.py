"""Shapes that are measured, and their tensors in the engine's layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ragorder.kernels.attention import PackedBatch

__all__ = ["DTYPES", "Problem", "Shape", "make_problem", "make_shapes"]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Shape:
    """So many requests, all alike: `query` new tokens behind `context` cached ones."""

    batch: int
    query: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int

    @property
    def flops(self) -> int:
        """Of both products, of what the causal mask leaves."""
        pairs = self.query * self.context + self.query * (self.query + 1) // 2
        return 4 * self.head_dim * self.heads * self.batch * pairs

    @property
    def bytes(self) -> int:
        """That have to be moved at least: keys and values once, queries in, results out."""
        keys = 2 * (self.context + self.query) * self.kv_heads
        itemsize: int = DTYPES[self.dtype].itemsize
        return self.batch * (keys + 2 * self.query * self.heads) * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class Problem:
    """A shape's tensors: new tokens packed, and a cache whose blocks are in no order."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: PackedBatch

    def gather(self) -> tuple[Tensor, Tensor]:
        """All keys and values in one piece, (batch, KV heads, context + query, D): what others need. One copy of them:
        the new tokens' are in the cache already, as an engine puts them there."""
        key, value = (
            cache[self.batch.block_tables.long()]
            .flatten(1, 2)[:, : self.shape.context + self.shape.query]
            .transpose(1, 2)
            for cache in (self.key_cache, self.value_cache)
        )
        return key, value

    def queries(self) -> Tensor:
        """(batch, query heads, query, D)."""
        return self.q.view(self.shape.batch, self.shape.query, *self.q.shape[1:]).transpose(1, 2)


def make_shapes(
    batches: Sequence[int],
    queries: Sequence[int],
    contexts: Sequence[int],
    heads: Sequence[tuple[int, int]],
    head_dims: Sequence[int],
    dtype: str,
    block_size: int,
) -> Iterator[Shape]:
    """All of them, from small to large."""
    for batch, head_dim, (query_heads, kv_heads), context, query in product(
        batches, head_dims, heads, contexts, queries
    ):
        yield Shape(batch, query, context, query_heads, kv_heads, head_dim, dtype, block_size)


def make_problem(shape: Shape, device: torch.device, seed: int) -> Problem:
    """Random ones."""
    rng = torch.Generator(device).manual_seed(seed)
    dtype = DTYPES[shape.dtype]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=rng, device=device, dtype=torch.float32).to(dtype)

    tokens = shape.batch * shape.query
    needed = -(-(shape.context + shape.query) // shape.block_size)
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
    places = torch.arange(shape.context, shape.context + shape.query, device=device)
    written = tables[:, places // shape.block_size].long()
    for cache, new in ((pool[:, 0], k), (pool[:, 1], v)):
        cache[written, places % shape.block_size] = new.view(shape.batch, shape.query, *new.shape[1:])
    return Problem(shape, q, k, v, pool[:, 0], pool[:, 1], batch)
