"""Packed sequences of one step, and key ranges of their rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

Span = tuple[int, int, int]
"""Begin and end of a request's new tokens, and its context's tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """R requests with T new tokens, for all layers of a step.

    - `query_starts` int32 (R + 1,): first new token of each request, then T.
    - `context_lengths` int32 (R,): cached tokens.
    - `block_tables` int32 (R, blocks): blocks of the context; further entries are ignored.
    """

    query_starts: Tensor
    context_lengths: Tensor
    block_tables: Tensor
    longest_query: int
    longest_context: int
    _memo: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        requests = self.context_lengths.numel()
        shapes = {
            "query_starts": (self.query_starts, (requests + 1,)),
            "context_lengths": (self.context_lengths, (requests,)),
            "block_tables": (self.block_tables, (requests, self.block_tables.shape[-1])),
        }
        for name, (tensor, shape) in shapes.items():
            if tensor.dtype is not torch.int32 or tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}: give torch.int32 {shape}")
            if tensor.device != self.context_lengths.device:
                raise ValueError(f"{name} is on {tensor.device}, context_lengths on {self.context_lengths.device}")
        if self.block_tables.stride(-1) != 1:
            raise ValueError("a row of block_tables must be contiguous")

    @classmethod
    def pack(
        cls,
        query_lengths: Sequence[int],
        context_lengths: Sequence[int],
        block_tables: Sequence[Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]],
        device: torch.device | str = "cpu",
    ) -> PackedBatch:
        if not len(query_lengths) == len(context_lengths) == len(block_tables):
            raise ValueError("give one query length, one context length and one block table for each request")
        size, width = len(block_tables), max(map(len, block_tables), default=0)
        starts = [0, *accumulate(query_lengths)]
        # One array, for one copy to the device.
        packed = np.zeros(2 * size + 1 + size * width, dtype=np.int32)
        packed[: size + 1], packed[size + 1 : 2 * size + 1] = starts, context_lengths
        for row, blocks in zip(packed[2 * size + 1 :].reshape(size, width), block_tables, strict=True):
            row[: len(blocks)] = blocks
        firsts, contexts, tables = to_device(packed, torch.device(device)).split([size + 1, size, size * width])
        longest = max(query_lengths, default=0), max(context_lengths, default=0)
        batch = cls(firsts, contexts, tables.view(size, width), *longest)
        batch._memo["spans"] = list(zip(starts, starts[1:], context_lengths, strict=False))
        return batch

    @property
    def requests(self) -> int:
        return len(self.context_lengths)

    @property
    def spans(self) -> list[Span]:
        # Waits for the device once, unless `pack` made the batch.
        return self.memo("spans", self._read_spans)

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        found: T = self._memo[key]
        return found

    def _read_spans(self) -> list[Span]:
        starts = self.query_starts.tolist()
        return list(zip(starts, starts[1:], self.context_lengths.tolist(), strict=False))


def to_device(array: np.ndarray[tuple[int], np.dtype[np.generic]], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class Ranges:
    """Row t attends to keys before `high[t]`, int32 (T,). Keeps `positions`, so that their `id` stays unique."""

    high: Tensor
    positions: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, positions: Tensor) -> Ranges:
        return batch.memo(("ranges", id(positions)), lambda: cls(positions + 1, positions))
