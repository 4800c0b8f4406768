"""Attention problems of one shape, and the implementations that solve them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ragorder.kernels.attention import PackedBatch, prefix_attention, sparse_attention
from ragorder.kernels.attention.attention import Backend
from ragorder.kernels.attention.batch import Ranges

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
Compute = Callable[[], Tensor]
"""Computes (tokens, query heads, D), or what can be viewed so."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Equal requests of `query` new tokens after `context` cached ones, or `scattered` among them."""

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
        """The places of a request's new tokens; the last one is at its end."""
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


Contender = Callable[[AttentionProblem], Compute]
"""Prepares a problem, outside the measured time. Raises MissingError."""


class MissingError(RuntimeError):
    """Not available, or not for this problem."""


def _triton(splits: int | None) -> Contender:
    def prepare(problem: AttentionProblem) -> Compute:
        _need_kernel(problem)
        from ragorder.kernels.attention.launch import triton_attention, triton_sparse_attention

        if splits is None:
            return _ours(problem, "triton")
        caches, scale = (problem.key_cache, problem.value_cache), 1 / math.sqrt(problem.shape.head_dim)
        if problem.shape.scattered:
            ranges = Ranges.of(problem.batch, problem.positions)
            return lambda: triton_sparse_attention(problem.q, *caches, problem.batch, ranges, scale, splits=splits)
        return lambda: triton_attention(problem.q, problem.k, problem.v, *caches, problem.batch, scale, splits=splits)

    return prepare


def _ours(problem: AttentionProblem, backend: Backend) -> Compute:
    caches, batch = (problem.key_cache, problem.value_cache), problem.batch
    if problem.shape.scattered:
        return lambda: sparse_attention(problem.q, *caches, batch, problem.positions, backend=backend)
    return lambda: prefix_attention(problem.q, problem.k, problem.v, *caches, batch, backend=backend)


def _masked(problem: AttentionProblem) -> Compute:
    # The backend that torch takes with a mask.
    q, (k, v), seen = problem.queries(), problem.gather(), problem.seen()
    group = q.shape[1] != k.shape[1]
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=group).transpose(1, 2)


def _sdpa(backend: SDPBackend, gather: bool) -> Contender:
    # torch raises where the backend cannot serve the problem.

    def prepare(problem: AttentionProblem) -> Compute:
        _need_cuda(problem)
        q = problem.queries()
        gathered = problem.gather()
        how = _causal(backend, problem)

        def run() -> Tensor:
            k, v = problem.gather() if gather else gathered
            with sdpa_kernel([backend]):
                found = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)
            return found.transpose(1, 2)

        return run

    return prepare


def _causal(backend: SDPBackend, problem: AttentionProblem) -> dict[str, Any]:
    # `is_causal` alone begins at the upper left: right only where nothing is cached.
    shape = problem.shape
    if shape.scattered and backend is SDPBackend.FLASH_ATTENTION:
        raise MissingError("has no mask for rows at any positions")
    if shape.scattered:
        return {"attn_mask": problem.seen()[None, None]}
    if not shape.context:
        return {"is_causal": True}
    bias = causal_lower_right(shape.query, shape.context + shape.query)
    if backend is SDPBackend.FLASH_ATTENTION:
        return {"attn_mask": bias}
    return {"attn_mask": bias._materialize(problem.q.device)[None, None]}


def _flex(mask_too: bool) -> Contender:
    def prepare(problem: AttentionProblem) -> Compute:
        _need_cuda(problem)
        attention, make_mask = _compiled_flex()
        q = problem.queries()
        k, v = problem.gather()
        positions = problem.positions[: problem.shape.query]

        def mask() -> Any:
            return make_mask(
                lambda _batch, _head, query, key: positions[query] >= key,
                None,
                None,
                q.shape[2],
                k.shape[2],
                device=q.device,
            )

        made = mask()

        def run() -> Tensor:
            block_mask = mask() if mask_too else made
            found: Tensor = attention(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
            return found.transpose(1, 2)

        return run

    return prepare


@lru_cache
def _compiled_flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention, dynamic=False), create_block_mask


def _need_cuda(problem: AttentionProblem) -> None:
    if not problem.q.is_cuda:
        raise MissingError("needs a GPU")


def _need_kernel(problem: AttentionProblem) -> None:
    if find_spec("triton") is None:
        raise MissingError("triton is not installed")
    from ragorder.kernels.attention.launch import INTERPRETED

    if not problem.q.is_cuda and not INTERPRETED:
        raise MissingError("needs a GPU, or TRITON_INTERPRET=1 to be checked")


CONTENDERS: dict[str, Contender] = {
    "triton": _triton(None),
    "triton unsplit": _triton(1),
    "torch": lambda problem: _ours(problem, "torch"),
    "sdpa + mask": _masked,
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION, False),
    "flash + gather": _sdpa(SDPBackend.FLASH_ATTENTION, True),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION, False),
    "flex": _flex(False),
    "flex + mask": _flex(True),
}
