"""Keys in runs of one offset, for which queries are turned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch, to_device

UNIT = 32
"""Adjacent keys of one offset."""

_NEVER = 2**31 - 1
"""Position of padding keys: no row sees them."""

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class QueryTurn(NamedTuple):
    """Rotation of a layer's queries for each offset. `table` float32 (offsets, 2, D): cosines and signed sines. The
    first `rotary` dimensions rotate: i with i + rotary / 2, or 2 i with 2 i + 1 if `adjacent`."""

    table: Tensor
    rotary: int
    adjacent: bool

    @property
    def of_keys(self) -> QueryTurn:
        """The rotation of the keys instead."""
        return self._replace(table=self.table * self.table.new_tensor([[1.0], [-1.0]]))

    def apply(self, queries: Tensor, offsets: Tensor) -> Tensor:
        """Return queries (.., heads, D) in float32, rotated for `offsets` int64 (..)."""
        cos, sin = self.table[offsets].unsqueeze(-3).unbind(-2)
        queries = queries.float()
        return queries * cos + self._partners(queries) * sin

    def _partners(self, queries: Tensor) -> Tensor:
        rotated = queries[..., : self.rotary]
        if self.adjacent:
            partners = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            partners = rotated.roll(self.rotary // 2, -1)
        return torch.cat((partners, queries[..., self.rotary :]), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Keys of R requests in units of one offset, by the first position of each unit (FusionRAG 4.3, A.1).

    Keys of an offset are read `moves[offset]` (int64) positions after where they were computed; instead of them, their
    queries are turned back.

    - `positions` int32 (R, keys): each key's position in its request.
    - `units` int32 (R, keys / UNIT): offset of each unit.
    - `begins` int32 (R, runs + 1), `offsets` int32 (R, runs): first keys of runs of units, and their offset.
    - `reaches` int32 (T,): row t sees no key from there on.
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
        """Pack, per request, each position's row in the pool and move, and positions of `queries`. The batch's blocks
        are rows."""
        ordered = [_order(*each) for each in zip(rows, moves, strict=True)]
        lengths = np.array([len(each.rows) for each in ordered])
        longest = int(lengths.max())
        distinct, offsets = np.unique(np.concatenate([each.moves for each in ordered]), return_inverse=True)
        of_units = np.split(offsets, np.cumsum(lengths[:-1] // UNIT))
        changes = [np.flatnonzero(np.diff(each, prepend=-1)) for each in of_units]
        runs = max(map(len, changes))
        # Memory that no row sees must be finite: keys that fill a request's table repeat its last one.
        table = np.stack([_filled(each.rows, longest, each.rows[-1]) for each in ordered])
        positions = np.stack([_filled(each.positions, longest, _NEVER) for each in ordered])
        units = np.stack([_filled(each, longest // UNIT, 0) for each in of_units])
        begins = np.stack(
            [_filled(each * UNIT, runs + 1, length) for each, length in zip(changes, lengths, strict=True)]
        )
        of_runs = np.stack([_filled(each[at], runs, 0) for each, at in zip(of_units, changes, strict=True)])
        reaches = np.concatenate(
            [
                np.searchsorted(each.positions[::UNIT], those, side="right") * UNIT
                for each, those in zip(ordered, queries, strict=True)
            ]
        )
        starts = np.cumsum([0, *map(len, queries)])
        parts = [starts, lengths, table, positions, units, begins, of_runs, reaches]
        short = to_device(np.concatenate([part.ravel() for part in parts]).astype(np.int32), torch.device(device))
        sent = short.split([part.size for part in parts])
        views = [each.view(part.shape) for each, part in zip(sent, parts, strict=True)]
        batch = PackedBatch(views[0], views[1], views[2], max(map(len, queries)), longest)
        moved = to_device(distinct, torch.device(device))
        return batch, cls(views[3], views[4], views[5], views[6], views[7], moved)


def _filled(values: _Ints, length: int, value: int) -> _Ints:
    found = np.full(length, value, dtype=np.int64)
    found[: len(values)] = values
    return found


class _Ordered(NamedTuple):
    """`moves` are by unit."""

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
