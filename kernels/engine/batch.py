"""Packing of a step's sequences as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ragorder.kernels.attention import PackedBatch
from ragorder.kernels.engine.attention import PagedLayers, PagedStep

__all__ = ["PackedStep", "Piece", "pack"]


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence behind `start` tokens in the blocks of `table`. `wants_logits`: of the last token."""

    token_ids: Sequence[int]
    start: int
    table: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]
    wants_logits: bool


@dataclass(frozen=True, slots=True)
class PackedStep:
    """Arguments of a forward."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    attention: PagedStep


def pack(pieces: Sequence[Piece], layers: PagedLayers, device: torch.device | str) -> PackedStep:
    counts = [len(piece.token_ids) for piece in pieces]
    starts = [0, *accumulate(counts)]
    total = starts[-1]
    tables = [np.asarray(piece.table, dtype=np.int32) for piece in pieces]
    width = max(map(len, tables))
    ends = [index - 1 for index, piece in zip(starts[1:], pieces, strict=True) if piece.wants_logits]
    # Tokens, positions and slots, and the tokens with logits.
    long = np.empty(3 * total + len(ends), dtype=np.int64)
    for piece, table, start, count in zip(pieces, tables, starts, counts, strict=False):
        positions = np.arange(piece.start, piece.start + count)
        long[start : start + count] = piece.token_ids
        long[total + start : total + start + count] = positions
        blocks, offsets = np.divmod(positions, layers.block_size)
        long[2 * total + start : 2 * total + start + count] = table[blocks] * np.int64(layers.block_rows) + offsets
    long[3 * total :] = ends

    # Where the pieces begin, their contexts, and the tables.
    size = len(pieces)
    short = np.zeros(2 * size + 1 + size * width, dtype=np.int32)
    short[: size + 1] = starts
    short[size + 1 : 2 * size + 1] = [piece.start for piece in pieces]
    matrix = short[2 * size + 1 :].reshape(size, width)
    for row, table in zip(matrix, tables, strict=True):
        row[: len(table)] = table

    longs, shorts = (_to(array, device) for array in (long, short))
    batch = PackedBatch(
        query_starts=shorts[: size + 1],
        context_lengths=shorts[size + 1 : 2 * size + 1],
        block_tables=shorts[2 * size + 1 :].view(size, width),
        longest_query=max(counts),
        longest_context=max(piece.start for piece in pieces),
    )
    token_ids, positions, slots, kept = longs.split([total, total, total, len(ends)])
    return PackedStep(token_ids, positions, kept, PagedStep(layers, batch, slots))


def _to(array: np.ndarray[tuple[int], np.dtype[np.generic]], device: torch.device | str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
