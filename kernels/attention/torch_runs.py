"""Attention to keys in runs, in torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, Ranges
from ragorder.kernels.attention.runs import UNIT, QueryTurn, Runs
from ragorder.kernels.attention.torch_backend import Caches, Rule, alike

_ROWS = 256
_SCORES = 1 << 24
"""Rows and scores per chunk: 64 MiB."""


def torch_run_attention(
    q: Tensor, caches: Caches, batch: PackedBatch, ranges: Ranges, runs: Runs, turn: QueryTurn | None, rule: Rule
) -> Tensor:
    rows = caches[0].squeeze(1), caches[1].squeeze(1)
    out = torch.empty_like(q)
    for group in batch.memo("runs alike", partial(alike, batch.spans, None)):
        make = partial(_Decoding.of, batch, ranges, runs, group)
        decoding = batch.memo(("runs decoding", group[0]), make)
        out[decoding.tokens] = _decode(q[decoding.tokens], rows, decoding, turn, rule).to(q.dtype)
    for request, (begin, end, keys) in enumerate(batch.spans):
        if end - begin > 1:
            step = max(1, min(_ROWS, _SCORES // (q.shape[1] * keys)))
            for first in range(begin, end, step):
                own = slice(first, min(first + step, end))
                out[own] = _prefill(q[own], rows, batch, ranges, runs, request, own, turn, rule).to(q.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Decoding:
    """R requests with one row each: `tokens` int64 (R,), `rows` (R x keys,), `offsets` int64 (R, units), and a mask
    (R, 1, 1, keys) for float32 scores."""

    tokens: Tensor
    rows: Tensor
    offsets: Tensor
    mask: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, ranges: Ranges, runs: Runs, group: list[int]) -> _Decoding:
        device = batch.block_tables.device
        requests = torch.tensor(group, device=device)
        tokens = torch.tensor([batch.spans[request][0] for request in group], device=device)
        keys = max(batch.spans[request][2] for request in group)
        hidden = runs.positions[requests, :keys] >= ranges.high[tokens, None]
        mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
        offsets = runs.units[requests, : keys // UNIT].long()
        return cls(tokens, batch.block_tables[requests, :keys].flatten(), offsets, mask[:, None, None])


def _decode(q: Tensor, caches: Caches, decoding: _Decoding, turn: QueryTurn | None, rule: Rule) -> Tensor:
    requests, heads, head_dim = q.shape
    units, kv_heads = decoding.offsets.shape[1], caches[0].shape[1]
    keys, values = (cache.index_select(0, decoding.rows).float() for cache in caches)
    q = q[:, None].expand(-1, units, -1, -1)
    q = q.float() if turn is None else turn.apply(q, decoding.offsets)
    q = q.reshape(requests * units, kv_heads, heads // kv_heads, head_dim)
    found = torch.matmul(q, keys.view(-1, UNIT, kv_heads, head_dim).permute(0, 2, 3, 1))
    scores = found.view(requests, units, kv_heads, -1, UNIT).permute(0, 2, 3, 1, 4).flatten(3)
    values = values.view(requests, -1, kv_heads, head_dim).transpose(1, 2)
    return _weigh(scores, decoding.mask, values, rule).reshape(requests, heads, head_dim)


def _prefill(
    q: Tensor,
    caches: Caches,
    batch: PackedBatch,
    ranges: Ranges,
    runs: Runs,
    request: int,
    own: slice,
    turn: QueryTurn | None,
    rule: Rule,
) -> Tensor:
    rows, heads, head_dim = q.shape
    kv_heads = caches[0].shape[1]
    last = int(runs.reaches[own].max())
    table = batch.block_tables[request, :last]
    keys, values = (cache.index_select(0, table).float() for cache in caches)
    parts = []
    for begin, end, offset in runs.cuts(request, batch):
        if begin < last:
            turned = q.float() if turn is None else turn.apply(q, offset)
            turned = turned.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
            parts.append(torch.matmul(turned, keys[begin:end].permute(1, 2, 0)))
    scores = torch.cat(parts, -1).view(kv_heads, heads // kv_heads, rows, last)
    hidden = runs.positions[request, :last] >= ranges.high[own, None]
    mask = torch.zeros(hidden.shape, device=q.device).masked_fill_(hidden, float("-inf"))
    found = _weigh(scores, mask, values.transpose(0, 1)[:, None], rule)
    return found.permute(2, 0, 1, 3).reshape(rows, heads, head_dim)


def _weigh(scores: Tensor, mask: Tensor, values: Tensor, rule: Rule) -> Tensor:
    if rule.softcap is None:
        scores = scores.mul_(rule.scale)
    else:
        scores = scores.mul_(rule.scale / rule.softcap).tanh_().mul_(rule.softcap)
    return torch.matmul(scores.add_(mask).softmax(-1), values)
