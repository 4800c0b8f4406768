"""Key ranges for the rows of a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ragorder.kernels.attention.batch import PackedBatch

__all__ = ["Chunk", "Ranges"]

_SLACK_TOKENS = 128
"""Keys masked before a chunk is split; for long ranges, an eighth of their keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Rows `begin` to `end` with keys from `first` to before `last`; `whole`: each row attends to all of these."""

    begin: int
    end: int
    first: int
    last: int
    whole: bool


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Row t attends to keys from `low[t]` (0 without `low`) to before `high[t]`; int32 (T,). `given` tensors are kept
    so that their `id`s stay unique."""

    low: Tensor | None
    high: Tensor
    given: tuple[Tensor, Tensor | None, Tensor | None]

    @classmethod
    def of(cls, batch: PackedBatch, positions: Tensor, low: Tensor | None, high: Tensor | None) -> Ranges:
        return batch.memo(
            ("ranges", id(positions), id(low), id(high)),
            lambda: cls(low, positions + 1 if high is None else high, (positions, low, high)),
        )

    def chunks(self, batch: PackedBatch, rows: int) -> list[list[Chunk]]:
        """Return each request's chunks of up to `rows` rows with similar ranges. Waits for the device once a step."""
        return batch.memo(("chunks", id(self), rows), lambda: list(self._cut(batch, rows)))

    def _cut(self, batch: PackedBatch, rows: int) -> Iterator[list[Chunk]]:
        highs = self.high.tolist()
        lows = [0] * len(highs) if self.low is None else self.low.clamp(min=0).tolist()
        for begin, end, context in batch.spans:
            ranges = [(low, min(high, context)) for low, high in zip(lows[begin:end], highs[begin:end], strict=True)]
            chunks, start = [], 0
            while start < len(ranges):
                chunk, start = _next_chunk(ranges, start, rows, begin)
                chunks.append(chunk)
            yield [chunk for chunk in chunks if chunk.first < chunk.last]


def _next_chunk(ranges: Sequence[tuple[int, int]], start: int, rows: int, offset: int) -> tuple[Chunk, int]:
    first, last, least = sys.maxsize, 0, sys.maxsize
    whole, end = True, start
    for low, high in ranges[start : start + rows]:
        if low < high:
            wider = min(first, low), max(last, high), min(least, high - low)
            if wider[1] - wider[0] - wider[2] > max(_SLACK_TOKENS, wider[2] // 8):
                break
            first, last, least = wider
        else:
            whole = False
        end += 1
    whole = whole and least == last - first
    return Chunk(offset + start, offset + end, first, last, whole), end
