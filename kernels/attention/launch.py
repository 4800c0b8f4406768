"""Launch of the kernels: tile, splits and strides."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, Ranges
from ragorder.kernels.attention.kernel import attend, attend_at, merge
from ragorder.kernels.attention.runs import QueryTurn, Runs
from ragorder.kernels.attention.table import (
    SCATTERED_ROWS,
    Tile,
    architecture,
    choose_splits,
    choose_tile,
    count_programs,
    halves,
)

INTERPRETED = not isinstance(attend, triton.JITFunction)

_LOG2_E = math.log2(math.e)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    """`tile` and `splits` override the table. Raises ValueError for cache rows not aligned to 16 bytes."""
    _check_alignment(key_cache, value_cache)
    q, k, v = map(_aligned, (q, k, v))
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    keys = batch.longest_context + batch.longest_query
    keys = keys if window is None else min(keys, window)
    tile, splits = _plan(q, batch, kv_heads, batch.longest_query * group, keys, tile, splits)
    tiles = tokens * group // tile.rows + batch.requests
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse, parts = _parts(out, splits)
    with _on(q.device):
        attend[(tiles, kv_heads, splits)](
            q, k, v, key_cache, value_cache, batch.query_starts, batch.context_lengths, batch.block_tables, parts, lse,
            scale * _LOG2_E if softcap is None else scale / softcap, 0.0 if softcap is None else softcap * _LOG2_E,
            batch.requests, tokens, window or 0, splits,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *key_cache.stride()[:3], *value_cache.stride()[:3], batch.block_tables.stride(0),
            heads * head_dim, head_dim,
            **constants(tile, group, head_dim, key_cache.shape[1]),
            WINDOWED=window is not None, CAPPED=softcap is not None, SPLIT=splits > 1,
            UPCAST=INTERPRETED and q.dtype is torch.bfloat16,
            **options(tile),
        )  # fmt: skip
        if splits > 1:
            _merge(parts, lse, out)
    return out


def triton_sparse_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    ranges: Ranges,
    scale: float,
    softcap: float | None = None,
    runs: Runs | None = None,
    turn: QueryTurn | None = None,
    *,
    tile: Tile | None = None,
    splits: int | None = None,
) -> Tensor:
    _check_alignment(key_cache, value_cache)
    q = _aligned(q)
    tokens, heads, head_dim = q.shape
    kv_heads = key_cache.shape[2]
    group = heads // kv_heads
    rows = min(batch.longest_query * group, SCATTERED_ROWS)
    tile, splits = _plan(q, batch, kv_heads, rows, batch.longest_context, tile, splits)
    tiles = tokens * group // tile.rows + batch.requests
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse, parts = _parts(out, splits)
    # Placeholders without runs.
    ordered = [ranges.high] * 5
    if runs is not None:
        ordered[:4] = runs.positions, runs.begins, runs.offsets, runs.reaches
    if turn is not None:
        ordered[4] = turn.table
    with _on(q.device):
        attend_at[(tiles, kv_heads, splits)](
            q, key_cache, value_cache, batch.query_starts, batch.context_lengths, batch.block_tables, ranges.high,
            parts, lse, *ordered,
            scale * _LOG2_E if softcap is None else scale / softcap, 0.0 if softcap is None else softcap * _LOG2_E,
            batch.requests, tokens, splits, 0 if runs is None else runs.offsets.shape[1],
            q.stride(0), q.stride(1), *key_cache.stride()[:3], *value_cache.stride()[:3], batch.block_tables.stride(0),
            heads * head_dim, head_dim,
            **constants(tile, group, head_dim, key_cache.shape[1]),
            CAPPED=softcap is not None, SPLIT=splits > 1,
            UPCAST=INTERPRETED and q.dtype is torch.bfloat16,
            RUNS=runs is not None, ROTARY=turn.rotary if turn else 0, ADJACENT=turn is not None and turn.adjacent,
            **options(tile),
        )  # fmt: skip
        if splits > 1:
            _merge(parts, lse, out)
    return out


def _plan(
    q: Tensor, batch: PackedBatch, kv_heads: int, rows: int, keys: int, tile: Tile | None, splits: int | None
) -> tuple[Tile, int]:
    tokens, heads, head_dim = q.shape
    family, multiprocessors = _device(q.device)
    tile = tile or choose_tile(family, head_dim, q.element_size(), rows)
    programs = count_programs(tile, tokens, batch.requests, heads // kv_heads, kv_heads)
    return tile, splits or choose_splits(tile, programs, keys, multiprocessors)


def _parts(out: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    if splits == 1:
        return out, out
    return (
        torch.empty(splits, *out.shape[:2], dtype=torch.float32, device=out.device),
        torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device),
    )


def _merge(parts: Tensor, lse: Tensor, out: Tensor) -> None:
    tokens, heads, head_dim = out.shape
    merge[(tokens, heads)](
        parts, lse, out, tokens, len(parts), heads * head_dim, head_dim,
        HEADS=heads, HEAD_DIM=head_dim, WIDTH=_power(head_dim), MOST=_power(len(parts)), num_warps=4,
    )  # fmt: skip


def constants(tile: Tile, group: int, head_dim: int, block_size: int) -> dict[str, int]:
    main, tail = halves(head_dim)
    return {
        "GROUP": group,
        "MAIN": main,
        "TAIL": tail,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
    }


def options(tile: Tile) -> dict[str, Any]:
    # Fuse multiply and add in scores * scale - maximum; Triton's default has changed before.
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": True}


@lru_cache
def _device(device: torch.device) -> tuple[str, int]:
    # The interpreter counts as an H100.
    if device.type != "cuda":
        return "sm_90", 132
    return (
        architecture(torch.cuda.get_device_capability(device)),
        torch.cuda.get_device_properties(device).multi_processor_count,
    )


def _on(device: torch.device) -> AbstractContextManager[Any]:
    # Triton launches on the current device.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _check_alignment(key_cache: Tensor, value_cache: Tensor) -> None:
    if not (_is_aligned(key_cache) and _is_aligned(value_cache)):
        raise ValueError("rows of key_cache and value_cache must be aligned to 16 bytes for the Triton kernel")


def _aligned(tensor: Tensor) -> Tensor:
    return tensor if _is_aligned(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_aligned(tensor: Tensor) -> bool:
    strides = (stride for stride, size in zip(tensor.stride()[:-1], tensor.shape, strict=False) if size > 1)
    size = tensor.element_size()
    return tensor.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in strides)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
