"""Attention in torch: reference, and backend on CPUs."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ragorder.kernels.attention.batch import PackedBatch, Ranges, Span

_ON_GPU = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Not cuDNN: it reads a mask in words of 16 bytes from any address, a lasting CUDA error."""

_MASK_ALIGNMENT = 8
"""Numbers. Some backends read a mask's rows in words without checking."""

CHUNK = 256
"""Rows per chunk; masked keys are computed too."""

_SLACK_TOKENS = 64
"""Padding that costs less than another call; in long contexts, an eighth of the length."""

SCORES = 1 << 24
"""Scores per chunk where torch's own attention is not used: 64 MiB."""


class Rule(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


Caches = tuple[Tensor, Tensor]
"""A layer's keys and values: (blocks, block size, KV heads, D)."""


def torch_attention(q: Tensor, k: Tensor, v: Tensor, caches: Caches, batch: PackedBatch, rule: Rule) -> Tensor:
    spans, window = batch.spans, rule.window
    if len(spans) == 1:
        return _one(q, k, v, caches, batch, 0, rule)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_size = caches[0].shape[1]
    together: set[int] = set()
    for rows in batch.memo(("alike", window), partial(alike, spans, window)):
        if len(rows) == 1:
            continue
        together.update(rows)
        make = partial(_decoding, batch, rows, window, block_size, q.dtype)
        group = batch.memo(("decoding", rows[0], window, block_size, q.dtype), make)
        out[group.tokens] = _decode(q, k, v, caches, group, rule)
    for row, (begin, end, _) in enumerate(spans):
        if row not in together and begin < end:
            out[begin:end] = _one(q[begin:end], k[begin:end], v[begin:end], caches, batch, row, rule)
    return out


def torch_sparse_attention(q: Tensor, caches: Caches, batch: PackedBatch, ranges: Ranges, rule: Rule) -> Tensor:
    rows = CHUNK
    if rule.softcap is not None:
        rows = max(1, min(CHUNK, SCORES // (q.shape[1] * max(1, batch.longest_context))))
    out = torch.empty_like(q)
    highs = batch.memo(("highs", id(ranges)), ranges.high.tolist)
    for request, (begin, end, context) in enumerate(batch.spans):
        most = min(context, max(highs[begin:end], default=0))
        keys, values = (_gather(cache, batch.block_tables[request], most) for cache in caches)
        for first in range(begin, end, rows):
            own = slice(first, min(first + rows, end))
            last = min(context, max(highs[own]))
            mask = hiding(torch.arange(last, device=q.device) >= ranges.high[own, None], q.dtype)
            out[own] = attend(q[own], keys[:last], values[:last], mask, rule)
    return out


@dataclass(frozen=True, slots=True)
class _Decoding:
    """R requests with one new token and L keys: `tokens` int64 (R,), `blocks` (R x blocks,), `places` int64 (R,) of new
    keys in L, additive `mask` (R, 1, 1, L), `hidden` int64 in R x L."""

    tokens: Tensor
    blocks: Tensor
    places: Tensor
    mask: Tensor
    hidden: Tensor


def _one(q: Tensor, k: Tensor, v: Tensor, caches: Caches, batch: PackedBatch, row: int, rule: Rule) -> Tensor:
    new, context, window = len(q), batch.spans[row][2], rule.window
    # Key 0 is the first of the block in which the window begins.
    first = 0 if window is None else max(0, context + 1 - window)
    first -= first % caches[0].shape[1]
    before = max(0, context - first)
    if before:
        k, v = (
            _join(cache, batch.block_tables[row], own, first, context)
            for cache, own in zip(caches, (k, v), strict=True)
        )
    elif rule.softcap is None and (window is None or window >= new):
        return attend(q, k, v, None, rule, causal=new > 1)
    parts = []
    for begin in range(0, new, CHUNK):
        end = min(new, begin + CHUNK)
        low = 0 if window is None else max(0, before + begin + 1 - window)
        mask = _mask(batch, q, window, end - begin, before + end - low) if end - begin > 1 else None
        keys = slice(low, before + end)
        parts.append(attend(q[begin:end], k[keys], v[keys], mask, rule))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _join(cache: Tensor, table: Tensor, new: Tensor, first: int, context: int) -> Tensor:
    block_size = cache.shape[1]
    blocks = table[first // block_size : -(-context // block_size)]
    gathered = len(blocks) * block_size
    joined = new.new_empty(gathered + len(new), *new.shape[1:])
    torch.index_select(cache, 0, blocks, out=joined[:gathered].view(len(blocks), *cache.shape[1:]))
    joined = joined[: context - first + len(new)]
    joined[context - first :] = new
    return joined


def _mask(batch: PackedBatch, like: Tensor, window: int | None, queries: int, keys: int) -> Tensor:
    def make() -> Tensor:
        height = min(CHUNK, batch.longest_query)
        width = batch.longest_context + batch.longest_query
        hidden = torch.ones(height, width, dtype=torch.bool, device=like.device).triu(width - height + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(width - height - window)
        return hiding(hidden, like.dtype)

    mask = batch.memo(("mask", window, like.dtype), make)
    return mask[len(mask) - queries :, mask.shape[1] - keys :]


def alike(spans: list[Span], window: int | None) -> list[list[int]]:
    """Group requests with one new token by similar length."""

    def keys(row: int) -> int:
        context = spans[row][2]
        return context if window is None else min(context, window)

    rows = [row for row, (begin, end, context) in enumerate(spans) if end - begin == 1 and context]
    groups: list[list[int]] = []
    for row in sorted(rows, key=keys, reverse=True):
        longest = keys(groups[-1][0]) if groups else 0
        if groups and longest - keys(row) <= max(_SLACK_TOKENS, longest // 8):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _decoding(
    batch: PackedBatch, rows: list[int], window: int | None, block_size: int, dtype: torch.dtype
) -> _Decoding:
    device = batch.block_tables.device
    contexts = torch.tensor([batch.spans[row][2] for row in rows])
    firsts = torch.zeros_like(contexts) if window is None else (contexts + 1 - window).clamp_(min=0)
    starts = firsts // block_size
    blocks = int((contexts // block_size - starts).max()) + 1
    # Padding repeats a request's last block, and the mask hides it.
    last = (contexts - 1) // block_size
    places = torch.minimum(starts[:, None] + torch.arange(blocks), last[:, None]).to(device)
    positions = starts[:, None] * block_size + torch.arange(blocks * block_size)
    hidden = (positions < firsts[:, None]) | (positions > contexts[:, None])
    return _Decoding(
        tokens=torch.tensor([batch.spans[row][0] for row in rows], device=device),
        blocks=batch.block_tables[torch.tensor(rows, device=device)[:, None], places].flatten(),
        places=(contexts - starts * block_size).to(device),
        mask=hiding(hidden, dtype)[:, None, None].to(device),
        hidden=hidden.flatten().nonzero().flatten().to(device),
    )


def _decode(q: Tensor, k: Tensor, v: Tensor, caches: Caches, group: _Decoding, rule: Rule) -> Tensor:
    requests, (_, heads, head_dim), kv_heads = len(group.tokens), q.shape, k.shape[1]
    q = q[group.tokens].view(requests, kv_heads, heads // kv_heads, head_dim)
    keys, values = (_pad(cache, own, group) for cache, own in zip(caches, (k, v), strict=True))
    return _product(q, keys, values, group.mask, rule).reshape(requests, heads, head_dim)


def _pad(cache: Tensor, new: Tensor, group: _Decoding) -> Tensor:
    requests, (_, kv_heads, head_dim) = len(group.tokens), new.shape
    keys = cache.index_select(0, group.blocks).view(-1, kv_heads, head_dim)
    # Unwritten memory may contain NaN, which a mask does not hide.
    keys.index_fill_(0, group.hidden, 0)
    keys = keys.view(requests, -1, kv_heads, head_dim)
    keys[torch.arange(requests, device=new.device), group.places] = new[group.tokens]
    return keys.transpose(1, 2)


def _gather(cache: Tensor, table: Tensor, last: int) -> Tensor:
    return cache.index_select(0, table[: -(-last // cache.shape[1])]).flatten(0, 1)[:last]


def hiding(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -math.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, *, causal: bool = False) -> Tensor:
    """q (n, query heads, D), k and v (m, KV heads, D), additive mask (n, m); returns (n, query heads, D)."""
    new, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    if new == 1 and mask is None:
        # Each head of a group is a query of its one KV head and sees all keys.
        q = q.view(1, kv_heads, group, head_dim)
        found = _product(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], None, rule)
        return found.reshape(1, heads, head_dim)
    # A group shares its keys by a stride of 0. KV heads are the batch, so that no backend needs to support groups.
    q = q.unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
    k, v = (each.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for each in (k, v))
    found = _product(q, k, v, mask, rule, causal=causal)
    return found.permute(2, 0, 1, 3).reshape(new, heads, head_dim)


def _product(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule, *, causal: bool = False) -> Tensor:
    """(batch, heads, n, D); with a softcap, which torch's function lacks, in float32."""
    if rule.softcap is None:
        if q.is_cuda and mask is not None:
            mask = _aligned(mask)
        with sdpa_kernel(_ON_GPU) if q.is_cuda else nullcontext():
            found: Tensor = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=rule.scale)
        return found
    scores = scaled(torch.matmul(q.float(), k.float().transpose(-1, -2)), rule)
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype)


def _aligned(mask: Tensor) -> Tensor:
    width = mask.shape[-1]
    padded = mask.new_empty(*mask.shape[:-1], -(-width // _MASK_ALIGNMENT) * _MASK_ALIGNMENT)
    return padded[..., :width].copy_(mask)


def scaled(scores: Tensor, rule: Rule) -> Tensor:
    """Scale and cap scores in place."""
    if rule.softcap is None:
        return scores.mul_(rule.scale)
    return scores.mul_(rule.scale / rule.softcap).tanh_().mul_(rule.softcap)
