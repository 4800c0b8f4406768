"""Attention weights over paged keys, in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

_ROWS = 256
"""Queries per chunk."""

_WEIGHTS = 1 << 22
"""Weights of all heads per chunk."""


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """A layer's n queries (n, HQ, D) at `positions` int64 (n,), with `prefix_attention`'s options."""

    rows: Tensor
    positions: Tensor
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def grouped(self, rows: slice, kv_heads: int) -> Tensor:
        """fp32 (HKV, queries of a group x n, D), scaled."""
        query = self.rows[rows].float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        return query * (self.rows.shape[-1] ** -0.5 if self.scale is None else self.scale)


@dataclass(frozen=True, slots=True, eq=False)
class Keys:
    """A sequence's rotated keys in one layer: `tokens` in the `cache` (blocks, block size, HKV, D) by `table` int64
    (blocks,), then `own` (n, HKV, D). `held` bool (tokens,) marks tokens with KV, by default all."""

    cache: Tensor
    table: Tensor
    tokens: int
    own: Tensor | None = None
    held: Tensor | None = None

    def __len__(self) -> int:
        return self.tokens + (0 if self.own is None else len(self.own))

    def chunks(self, most: int) -> list[tuple[int, int]]:
        size = self.cache.shape[1]
        step = max(size, most - most % size)
        borders = [*range(0, self.tokens, step), *range(self.tokens, len(self), step), len(self)]
        return list(pairwise(borders))

    def read(self, begin: int, end: int) -> Tensor:
        if self.own is not None and begin >= self.tokens:
            rows = self.own[begin - self.tokens : end - self.tokens]
        else:
            size = self.cache.shape[1]
            rows = self.cache[self.table[begin // size : -(-end // size)]].flatten(0, 1)[: end - begin]
        return rows.float().permute(1, 2, 0)

    def hidden(self, begin: int, end: int, queries: Queries, rows: slice) -> Tensor:
        at = torch.arange(begin, end, device=self.cache.device)
        positions = queries.positions[rows, None]
        hidden = at > positions
        if queries.window is not None:
            hidden |= at <= positions - queries.window
        if self.held is not None and begin < self.tokens:
            hidden |= ~self.held[begin:end]
        return hidden


def attention_received(queries: Queries, keys: Keys) -> Tensor:
    """Return each key's weights, fp32 (keys,), summed over queries, mean over heads (FusionRAG 3.2)."""
    heads = queries.rows.shape[1]
    received = torch.zeros(len(keys), device=keys.cache.device)
    for (begin, end), weights in _weights(queries, keys):
        received[begin:end] += weights.sum((0, 1)) / heads
    return received


def _weights(queries: Queries, keys: Keys) -> Iterator[tuple[tuple[int, int], Tensor]]:
    # Scores are computed twice: their sum over all keys is needed first.
    count, heads = queries.rows.shape[:2]
    for first in range(0, count, _ROWS):
        rows = slice(first, min(first + _ROWS, count))
        chunks = keys.chunks(_WEIGHTS // (heads * (rows.stop - first)))
        sums = [_scores(queries, keys, rows, chunk).logsumexp(-1, keepdim=True) for chunk in chunks]
        total = torch.stack(sums).logsumexp(0)
        # A query that sees no key has no weights.
        total.masked_fill_(total.isneginf(), 0)
        for chunk in chunks:
            yield chunk, _scores(queries, keys, rows, chunk).sub_(total).exp_()


def _scores(queries: Queries, keys: Keys, rows: slice, chunk: tuple[int, int]) -> Tensor:
    heads, kv_heads = queries.rows.shape[1], keys.cache.shape[2]
    scores = torch.matmul(queries.grouped(rows, kv_heads), keys.read(*chunk)).view(heads, rows.stop - rows.start, -1)
    if queries.softcap is not None:
        scores = scores.div_(queries.softcap).tanh_().mul_(queries.softcap)
    # Unwritten memory may contain NaN, so hidden scores are replaced, not added to.
    return scores.masked_fill_(keys.hidden(*chunk, queries, rows), float("-inf"))
