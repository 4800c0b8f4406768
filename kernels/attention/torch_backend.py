"""Attention in torch: reference, and backend on CPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, Span
from ragorder.kernels.attention.dense import Rule, attend, product

__all__ = ["torch_attention"]

_CHUNK = 256
"""Queries per chunk; masked keys are computed too."""

_SLACK_TOKENS = 64
"""Padding that costs less than another call; for long contexts, an eighth of their length."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """R requests with one new token each, padded to L keys."""

    tokens: Tensor
    """int64 (R,): indices of their new tokens."""

    blocks: Tensor
    """(R x blocks,)"""

    places: Tensor
    """int64 (R,): indices of the new keys in L."""

    mask: Tensor
    """(R, 1, 1, L), additive."""

    hidden: Tensor
    """int64: indices of hidden keys in R x L."""


# Without cached keys: torch's causal attention, with no mask or copy. Otherwise a request's keys, cached and new, are
# gathered, and its queries are processed in chunks. One mask per step, cut to size, serves all chunks, requests and
# layers. Decoding requests of similar length are batched.


def torch_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PackedBatch,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    rule, caches = Rule(scale, window, softcap), (key_cache, value_cache)
    spans = batch.spans
    if len(spans) == 1:
        return _one(q, k, v, caches, batch, 0, rule)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    block_size = key_cache.shape[1]
    together: set[int] = set()
    for rows in batch.memo(("alike", window), partial(_alike, spans, window)):
        together.update(rows)
        make = partial(_decoding, batch, rows, window, block_size, q.dtype)
        group = batch.memo(("decoding", rows[0], window, block_size, q.dtype), make)
        out[group.tokens] = _decode(q, k, v, caches, group, rule)
    for row, (begin, end, _) in enumerate(spans):
        if row not in together and begin < end:
            out[begin:end] = _one(q[begin:end], k[begin:end], v[begin:end], caches, batch, row, rule)
    return out


def _one(
    q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], batch: PackedBatch, row: int, rule: Rule
) -> Tensor:
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
    for begin in range(0, new, _CHUNK):
        end = min(new, begin + _CHUNK)
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
    """Return the additive mask of the last `queries` of `keys` positions: a corner of the step's mask."""

    def make() -> Tensor:
        height = min(_CHUNK, batch.longest_query)
        width = batch.longest_context + batch.longest_query
        hidden = torch.ones(height, width, dtype=torch.bool, device=like.device).triu(width - height + 1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(width - height - window)
        return torch.zeros(height, width, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))

    mask = batch.memo(("mask", window, like.dtype), make)
    return mask[len(mask) - queries :, mask.shape[1] - keys :]


def _alike(spans: list[Span], window: int | None) -> list[list[int]]:
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
    return [group for group in groups if len(group) > 1]


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
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return _Decoding(
        tokens=torch.tensor([batch.spans[row][0] for row in rows], device=device),
        blocks=batch.block_tables[torch.tensor(rows, device=device)[:, None], places].flatten(),
        places=(contexts - starts * block_size).to(device),
        mask=mask[:, None, None].to(device),
        hidden=hidden.flatten().nonzero().flatten().to(device),
    )


def _decode(q: Tensor, k: Tensor, v: Tensor, caches: tuple[Tensor, Tensor], group: _Decoding, rule: Rule) -> Tensor:
    requests, (_, heads, head_dim), kv_heads = len(group.tokens), q.shape, k.shape[1]
    q = q[group.tokens].view(requests, kv_heads, heads // kv_heads, head_dim)
    keys, values = (_pad(cache, own, group) for cache, own in zip(caches, (k, v), strict=True))
    return product(q, keys, values, group.mask, rule).reshape(requests, heads, head_dim)


def _pad(cache: Tensor, new: Tensor, group: _Decoding) -> Tensor:
    requests, (_, kv_heads, head_dim) = len(group.tokens), new.shape
    keys = cache.index_select(0, group.blocks).view(-1, kv_heads, head_dim)
    # Unwritten memory may contain NaN, which a mask does not hide.
    keys.index_fill_(0, group.hidden, 0)
    keys = keys.view(requests, -1, kv_heads, head_dim)
    keys[torch.arange(requests, device=new.device), group.places] = new[group.tokens]
    return keys.transpose(1, 2)
