"""Critical tokens computed as though their document were the last of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragorder.kernels.attention import PackedBatch, merge_attention, sparse_attention
from ragorder.kernels.attention.backends import Backend
from ragorder.kernels.attention.weights import Queries
from ragorder.kernels.fusion.rotation import Rotation

__all__ = ["AsIfLast", "Documents"]

Documents = Sequence[tuple[int, int]]
"""Begins and ends of a request's documents, in the order of the prompt."""

_Range = tuple[int, int, int]
"""Keys from the first number to before the second; the third: how far the query moves for them."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some rows of a step, request by request: `places` int64 among all of the step's."""

    places: Tensor
    batch: PackedBatch
    positions: Tensor
    low: Tensor | None = None
    high: Tensor | None = None


class AsIfLast:
    """Attention of one step with rows at any positions, some of them critical, for all of its layers.

    With its document last, a critical token would see all other documents, and stand behind them. So it sees three
    ranges of keys where they are: in front of its document, in its document up to itself, and in the documents behind.
    For each its query is rotated to the distance that it would have, and the three results are merged by their weights.
    Keys and other rows are as ever. What critical tokens attend to does not depend on the documents' order.

    One step should have all critical tokens of a request: in each layer they see each other's new keys.

        last = AsIfLast(batch, positions, critical, documents, rotation)
        out = last.attend(query, key_cache, value_cache, layer, scale=scale)
    """

    def __init__(
        self,
        batch: PackedBatch,
        positions: Tensor,
        critical: Tensor,
        documents: Sequence[Documents],
        rotation: Rotation,
    ) -> None:
        """`batch` and `positions` int32 (T,) as for `sparse_attention`; `critical` bool (T,); `documents` by request.

        Raises ValueError for a critical token outside of its request's documents.
        """
        chosen, numbers = critical.tolist(), positions.tolist()
        ordinary: list[list[int]] = []
        tripled: list[list[int]] = []
        ranges: list[_Range] = []
        # Of each critical row, its three places among the tripled rows.
        thirds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for (begin, end, _), spans in zip(batch.spans, documents, strict=True):
            own = [row for row in range(begin, end) if chosen[row]]
            found = [_ranges(numbers[row], spans) for row in own]
            for third, places in enumerate(thirds):
                places += range(len(ranges), len(ranges) + len(own))
                ranges += [each[third] for each in found]
            tripled.append(own * 3)
            ordinary.append([row for row in range(begin, end) if not chosen[row]])

        device = positions.device
        lows, highs, moves = torch.tensor(ranges, dtype=torch.int32).reshape(-1, 3).T.contiguous().to(device)
        self._ordinary = _choose(batch, positions, ordinary)
        self._tripled = _choose(batch, positions, tripled, lows, highs)
        self._thirds = [torch.tensor(places, dtype=torch.int64, device=device) for places in thirds]
        self._turn = rotation.turn(moves.long(), self._tripled.positions.long())

    def attend(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        layer: int,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """As `sparse_attention`: `q` (T, query heads, D), rotated by the rows' positions; returns the same shape."""
        ordinary, tripled = self._ordinary, self._tripled
        out = torch.empty_like(q)
        out[ordinary.places] = sparse_attention(
            q[ordinary.places], key_cache, value_cache, ordinary.batch, ordinary.positions,
            scale=scale, softcap=softcap, backend=backend,
        )  # fmt: skip
        parts, weights = sparse_attention(
            self._turn.apply(q[tripled.places], layer), key_cache, value_cache, tripled.batch, tripled.positions,
            low=tripled.low, high=tripled.high, scale=scale, softcap=softcap, lse=True, backend=backend,
        )  # fmt: skip
        out[tripled.places[self._thirds[0]]] = merge_attention(
            [parts[third] for third in self._thirds], [weights[third] for third in self._thirds]
        )
        return out

    def queries(
        self, q: Tensor, layer: int, *, scale: float | None = None, softcap: float | None = None
    ) -> list[Queries]:
        """The critical ones of `q`, as they see each of the three ranges."""
        tripled = self._tripled
        assert tripled.low is not None and tripled.high is not None
        turned = self._turn.apply(q[tripled.places], layer)
        return [
            Queries(
                turned[third], tripled.positions[third], scale, None, softcap, tripled.low[third], tripled.high[third]
            )
            for third in self._thirds
        ]


def _ranges(position: int, documents: Documents) -> tuple[_Range, _Range, _Range]:
    for begin, end in documents:
        if begin <= position < end:
            last = documents[-1][1]
            return (0, begin, last - end), (begin, position + 1, 0), (end, last, last - begin)
    raise ValueError(f"the critical token at position {position} is in none of its request's documents")


def _choose(
    batch: PackedBatch,
    positions: Tensor,
    rows: Sequence[Sequence[int]],
    low: Tensor | None = None,
    high: Tensor | None = None,
) -> _Rows:
    places = torch.tensor([row for own in rows for row in own], dtype=torch.int64, device=positions.device)
    return _Rows(places, batch.with_rows([len(own) for own in rows]), positions[places], low, high)
