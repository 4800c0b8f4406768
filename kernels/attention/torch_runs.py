"""Attention to keys in runs, in torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, Ranges
from ragorder.kernels.attention.runs import UNIT, QueryTurn, Runs
from ragorder.kernels.attention.torch_backend import CHUNK, SCORES, Caches, Rule, alike, attend, hiding, scaled

_SLACK_KEYS = 64
"""Rows of a chunk may see that many more keys than others of it, or an eighth more: few hidden keys cost less than
another call."""


def torch_run_attention(
    q: Tensor, caches: Caches, batch: PackedBatch, ranges: Ranges, runs: Runs, turn: QueryTurn | None, rule: Rule
) -> Tensor:
    out = torch.empty_like(q)
    for group in batch.memo("runs alike", partial(alike, batch.spans, None)):
        make = partial(_Decoding.of, batch, ranges, runs, group, caches[0].shape[2])
        decoding = batch.memo(("runs decoding", group[0]), make)
        out[decoding.tokens] = _decode(q[decoding.tokens], caches, decoding, turn, rule).to(q.dtype)
    for request, (begin, end, _) in enumerate(batch.spans):
        if end - begin > 1:
            out[begin:end] = _prefill(q, caches, batch, ranges, runs, request, turn, rule)
    return out


@dataclass(frozen=True, slots=True)
class _Decoding:
    """R requests with one row, `tokens` int64 (R,). Keys' `rows` int64 (KV heads, R x keys), `offsets` int64 (R,
    units), float32 `mask` (R, 1, keys)."""

    tokens: Tensor
    rows: Tensor
    offsets: Tensor
    mask: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, ranges: Ranges, runs: Runs, group: list[int], kv_heads: int) -> _Decoding:
        device = batch.block_tables.device
        requests = torch.tensor(group, device=device)
        tokens = torch.tensor([batch.spans[request][0] for request in group], device=device)
        keys = max(batch.spans[request][2] for request in group)
        hidden = runs.positions[requests, :keys] >= ranges.high[tokens, None]
        offsets = runs.units[requests, : keys // UNIT].long()
        heads = torch.arange(kv_heads, device=device)[:, None]
        rows = batch.block_tables[requests, :keys].long().flatten() * kv_heads + heads
        return cls(tokens, rows, offsets, hiding(hidden, torch.float32)[:, None])


def _decode(q: Tensor, caches: Caches, decoding: _Decoding, turn: QueryTurn | None, rule: Rule) -> Tensor:
    requests, heads, head_dim = q.shape
    units, kv_heads = decoding.offsets.shape[1], caches[0].shape[2]
    keys, values = (
        cache.flatten(0, 2).index_select(0, decoding.rows.flatten()).view(kv_heads, -1, head_dim).float()
        for cache in caches
    )
    q = q[:, None].expand(-1, units, -1, -1)
    q = q.float() if turn is None else turn.apply(q, decoding.offsets)
    q = q.reshape(requests * units, kv_heads, -1, head_dim).transpose(0, 1)
    found = torch.matmul(q, keys.unflatten(1, (-1, UNIT)).transpose(2, 3))
    scores = found.unflatten(1, (requests, units)).transpose(2, 3).flatten(3)
    weights = scaled(scores, rule).add_(decoding.mask).softmax(-1)
    found = torch.matmul(weights, values.unflatten(1, (requests, -1)))
    return found.permute(1, 0, 2, 3).reshape(requests, heads, head_dim)


def _prefill(
    q: Tensor,
    caches: Caches,
    batch: PackedBatch,
    ranges: Ranges,
    runs: Runs,
    request: int,
    turn: QueryTurn | None,
    rule: Rule,
) -> Tensor:
    begin, end, length = batch.spans[request]
    table = batch.block_tables[request, :length]
    keys, values = (cache.flatten(0, 1).index_select(0, table) for cache in caches)
    if turn is not None:
        # Rows are many: rotating the keys takes less time than the queries of each run.
        units = runs.units[request, : length // UNIT].long()
        keys = turn.of_keys.apply(keys.view(len(units), -1, keys.shape[-1]), units).view_as(keys).to(q.dtype)
    rows = CHUNK if rule.softcap is None else max(1, min(CHUNK, SCORES // (q.shape[1] * length)))
    reaches = batch.memo(("reaches", request), runs.reaches[begin:end].tolist)
    parts = []
    for first, stop, last in _chunks(reaches, rows):
        own = slice(begin + first, begin + stop)
        hidden = runs.positions[request, :last] >= ranges.high[own, None]
        parts.append(attend(q[own], keys[:last], values[:last], hiding(hidden, q.dtype), rule))
    return torch.cat(parts)


def _chunks(reaches: Sequence[int], rows: int) -> Iterator[tuple[int, int, int]]:
    """Yield chunks of up to `rows` rows that see about as many keys: first row, end, and most keys of a row."""
    first, least, most = 0, reaches[0], reaches[0]
    for row, reach in enumerate(reaches):
        shortest, longest = min(least, reach), max(most, reach)
        if row - first == rows or longest - shortest > max(_SLACK_KEYS, shortest // 8):
            yield first, row, most
            first, shortest, longest = row, reach, reach
        least, most = shortest, longest
    yield first, len(reaches), most
