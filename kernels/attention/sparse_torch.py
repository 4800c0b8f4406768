"""Attention of rows at any positions in torch: reference, and backend on CPUs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch
from ragorder.kernels.attention.dense import Rule, attend, attend_with_weight
from ragorder.kernels.attention.ranges import Chunk, Ranges

__all__ = ["torch_sparse_attention"]

_ROWS = 256
"""Rows per chunk."""

_SCORES = 1 << 24
"""Scores per chunk where torch's own attention is not used: 64 MiB."""


def torch_sparse_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    ranges: Ranges,
    scale: float,
    softcap: float | None = None,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    rule = Rule(scale, None, softcap)
    rows = _ROWS
    if lse or softcap is not None:
        rows = max(1, min(_ROWS, _SCORES // (q.shape[1] * max(1, batch.longest_context))))
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    weight = torch.full(q.shape[:2], -math.inf, device=q.device) if lse else None
    for request, chunks in enumerate(ranges.chunks(batch, rows)):
        if not chunks:
            continue
        first, last = min(chunk.first for chunk in chunks), max(chunk.last for chunk in chunks)
        table = batch.block_tables[request]
        keys, values = (_gather(cache, table, first, last) for cache in (key_cache, value_cache))
        for chunk in chunks:
            own, seen = slice(chunk.begin, chunk.end), slice(chunk.first - first, chunk.last - first)
            mask, blind = (None, None) if chunk.whole else _mask(chunk, ranges, q.dtype)
            if weight is None:
                found = attend(q[own], keys[seen], values[seen], mask, rule)
                # torch versions differ in their values for rows without keys.
                out[own] = found if blind is None else found.masked_fill(blind[:, None, None], 0)
            else:
                out[own], weight[own] = attend_with_weight(q[own], keys[seen], values[seen], mask, rule)
    return out, weight


def _gather(cache: Tensor, table: Tensor, first: int, last: int) -> Tensor:
    """(last - first, KV heads, D)"""
    block_size = cache.shape[1]
    skipped = first // block_size
    blocks = table[skipped : -(-last // block_size)]
    begin = first - skipped * block_size
    return cache.index_select(0, blocks).flatten(0, 1)[begin : begin + last - first]


def _mask(chunk: Chunk, ranges: Ranges, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the additive mask (rows, keys), and the rows that see no key."""
    own = slice(chunk.begin, chunk.end)
    high = ranges.high[own, None]
    position = torch.arange(chunk.first, chunk.last, device=high.device)
    hidden = position >= high
    if ranges.low is not None:
        hidden |= position < ranges.low[own, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=high.device).masked_fill_(hidden, -math.inf), hidden.all(1)
