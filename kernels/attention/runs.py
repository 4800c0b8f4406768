"""Keys in runs of one offset, for which a request's queries are turned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, to_device

UNIT = 32
"""Keys of one offset that lie together."""

_NEVER = 2**31 - 1
"""Position of a key that fills a unit: no row sees it."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class QueryTurn(NamedTuple):
    """Rotation of a layer's queries for each offset. `table` float32 (offsets, 2, D): cosines, and sines with the sign
    of their dimension. The first `rotary` dimensions rotate: i with i + rotary / 2, or 2 i with 2 i + 1 if
    `adjacent`."""

    table: Tensor
    rotary: int
    adjacent: bool

    @property
    def partners(self) -> Tensor:
        dims = torch.arange(self.table.shape[-1], device=self.table.device)
        half = self.rotary // 2
        others = dims ^ 1 if self.adjacent else torch.where(dims < half, dims + half, dims - half)
        return torch.where(dims < self.rotary, others, dims)

    def apply(self, queries: Tensor, offsets: Tensor | int) -> Tensor:
        """Return float32: queries (.., heads, D), turned for `offsets` (..) or one for all."""
        cos, sin = self.table[offsets].unbind(-2)
        if isinstance(offsets, Tensor):
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        queries = queries.float()
        return queries * cos + queries[..., self.partners] * sin


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Keys of R requests in units of one offset, by the first position of each unit (FusionRAG 4.3, A.1).

    A key that is read `moves[offset]` positions after where it was computed is not turned: its queries are turned back.

    - `positions` int32 (R, keys): each key's position in its request.
    - `units` int32 (R, keys / UNIT): offset of each unit.
    - `begins` int32 (R, runs + 1), `offsets` int32 (R, runs): first keys of runs of units, and their offset.
    - `reaches` int32 (T,): row t sees no key after as many.
    - `moves` int64 (offsets,).
    """

    positions: Tensor
    units: Tensor
    begins: Tensor
    offsets: Tensor
    reaches: Tensor
    moves: Tensor

    @classmethod
    def pack(
        cls, rows: Sequence[_Ints], moves: Sequence[_Ints], queries: Sequence[_Ints], device: torch.device | str
    ) -> tuple[PackedBatch, Self]:
        """Order the keys of each request. `rows`: where each position's key is, `moves`: positions since it was
        computed, `queries`: positions of the rows that attend to them. Blocks of the batch are rows."""
        ordered = [_order(*each) for each in zip(rows, moves, strict=True)]
        distinct, numbers = np.unique(np.concatenate([each.moves for each in ordered]), return_inverse=True)
        size, keys = len(rows), max(len(each.rows) for each in ordered)
        starts = np.cumsum([0, *map(len, queries)])
        tables = np.empty((size, keys), dtype=np.int32)
        positions = np.full((size, keys), _NEVER, dtype=np.int32)
        units = np.zeros((size, keys // UNIT), dtype=np.int32)
        changes, reaches, first = [], [], 0
        for request, each in enumerate(ordered):
            count = len(each.moves)
            # Rows that no request sees must be finite: the last one is repeated.
            tables[request] = each.rows[-1]
            tables[request, : len(each.rows)] = each.rows
            positions[request, : len(each.rows)] = each.positions
            own = units[request, :count] = numbers[first : first + count]
            changes.append(np.flatnonzero(np.diff(own, prepend=-1)))
            reaches.append(np.searchsorted(each.positions[::UNIT], queries[request], side="right") * UNIT)
            first += count
        runs = max(map(len, changes))
        begins = np.empty((size, runs + 1), dtype=np.int32)
        offsets = np.zeros((size, runs), dtype=np.int32)
        for request, (each, change) in enumerate(zip(ordered, changes, strict=True)):
            begins[request] = len(each.rows)
            begins[request, : len(change)] = change * UNIT
            offsets[request, : len(change)] = units[request, change]
        contexts = np.array([len(each.rows) for each in ordered])
        parts = [starts, contexts, tables, positions, units, begins, offsets, np.concatenate(reaches)]
        shorts = to_device(np.concatenate([part.ravel() for part in parts]).astype(np.int32), torch.device(device))
        views = [
            short.view(part.shape)
            for short, part in zip(shorts.split([part.size for part in parts]), parts, strict=True)
        ]
        batch = PackedBatch(*views[:3], max(map(len, queries)), keys)
        return batch, cls(*views[3:], to_device(distinct, torch.device(device)))

    def cuts(self, request: int, batch: PackedBatch) -> list[tuple[int, int, int]]:
        """Return a request's runs: begin, end and offset. Waits for the device once a step."""
        begins, offsets = batch.memo("runs", lambda: (self.begins.tolist(), self.offsets.tolist()))
        ends = begins[request][1:]
        found = zip(begins[request], ends, offsets[request], strict=False)
        return [(begin, end, offset) for begin, end, offset in found if begin < end]


class _Ordered(NamedTuple):
    """Rows and positions of the keys, and the move of each unit."""

    rows: _Ints
    positions: _Ints
    moves: _Ints


def _order(rows: _Ints, moves: _Ints) -> _Ordered:
    by_move = np.argsort(moves, kind="stable")
    sorted_moves = moves[by_move]
    starts = np.flatnonzero(np.diff(sorted_moves, prepend=sorted_moves[0] - 1))
    counts = np.diff(starts, append=len(moves))
    padded = -(-counts // UNIT) * UNIT
    place = np.arange(padded.sum()) - np.repeat(np.cumsum(padded) - padded, padded)
    last = np.repeat(counts - 1, padded)
    found = by_move[np.repeat(starts, padded) + np.minimum(place, last)].reshape(-1, UNIT)
    positions = np.where(place <= last, found.ravel(), _NEVER).reshape(-1, UNIT)
    order = np.argsort(positions[:, 0])
    found = found[order]
    return _Ordered(rows[found].ravel(), positions[order].ravel(), moves[found[:, 0]])
