"""Packing of a step's sequences into tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from ragorder.kernels.attention import PackedBatch
from ragorder.kernels.models.attention import STEP, PagedStep, ScatteredRows, StepAttention
from ragorder.kernels.offload.stream import LayerStreamer
from ragorder.kernels.paging import BlockPool

_Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence after `start` tokens in the blocks of `table`; `wants_logits` of the last one.
    `positions` of scattered tokens begin with `start`; the positions between them have KV."""

    token_ids: Sequence[int]
    start: int
    table: Sequence[int] | _Ints
    wants_logits: bool
    positions: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]] | None = None

    @property
    def context(self) -> int:
        return self.start if self.positions is None else int(np.max(self.positions)) + 1


class PackedStep(NamedTuple):
    """Arguments of a forward. Logits are in the order of the pieces."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    attention: PagedStep


def pack(pieces: Sequence[Piece], pool: BlockPool) -> PackedStep:
    shape, device = pool.shape, pool.device
    # Scattered rows come last, so that the attention of the other pieces ignores them.
    order = sorted(range(len(pieces)), key=lambda place: pieces[place].positions is not None)
    packed = [pieces[place] for place in order]
    counts = [len(piece.token_ids) for piece in packed]
    starts = [0, *accumulate(counts)]
    total = starts[-1]
    tables = [np.asarray(piece.table, dtype=np.int32) for piece in packed]
    last = dict(zip(order, starts[1:], strict=True))
    ends = [last[place] - 1 for place, piece in enumerate(pieces) if piece.wants_logits]
    # Tokens, positions, slots, and tokens with logits.
    long = np.empty(3 * total + len(ends), dtype=np.int64)
    for piece, table, start, count in zip(packed, tables, starts, counts, strict=False):
        positions = np.arange(piece.start, piece.start + count) if piece.positions is None else piece.positions
        long[start : start + count] = piece.token_ids
        long[total + start : total + start + count] = positions
        blocks, offsets = np.divmod(positions, shape.block_size)
        long[2 * total + start : 2 * total + start + count] = table[blocks] * np.int64(shape.block_rows) + offsets
    long[3 * total :] = ends

    adjacent = sum(piece.positions is None for piece in packed)
    contexts = [piece.context for piece in packed]
    batch = _batch(counts[:adjacent], contexts[:adjacent], tables[:adjacent], device)
    longs = to_device(long, device)
    token_ids, positions_, slots, kept = longs.split([total, total, total, len(ends)])
    scattered = None
    if adjacent < len(packed):
        rows = _batch(counts[adjacent:], contexts[adjacent:], tables[adjacent:], device)
        scattered = ScatteredRows(rows, positions_[starts[adjacent] :].int())
    return PackedStep(token_ids, positions_, kept, PagedStep(pool, batch, slots, scattered))


def _batch(
    counts: Sequence[int], contexts: Sequence[int], tables: Sequence[_Ints], device: torch.device
) -> PackedBatch:
    size = len(counts)
    width = max(map(len, tables), default=0)
    short = np.zeros(2 * size + 1 + size * width, dtype=np.int32)
    short[: size + 1] = [0, *accumulate(counts)]
    short[size + 1 : 2 * size + 1] = contexts
    matrix = short[2 * size + 1 :].reshape(size, width)
    for row, table in zip(matrix, tables, strict=True):
        row[: len(table)] = table
    shorts = to_device(short, device)
    return PackedBatch(
        query_starts=shorts[: size + 1],
        context_lengths=shorts[size + 1 : 2 * size + 1],
        block_tables=shorts[2 * size + 1 :].view(size, width),
        longest_query=max(counts, default=0),
        longest_context=max(contexts, default=0),
    )


def to_device(array: np.ndarray[tuple[int], np.dtype[np.generic]], device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class ForwardEnded(Exception):  # noqa: N818
    """A step's attention raises this once the rest is not needed."""


class Forward:
    """Calls a causal language model with a step's attention."""

    def __init__(self, model: Any, streamer: LayerStreamer | None = None) -> None:
        self._model = model
        self._streamer = streamer
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def streams(self) -> bool:
        """Whether some layers' weights arrive during a step."""
        return self._streamer is not None

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """token_ids, positions int64 (T,), kept int64 (N,): tokens with logits; returns (N, vocabulary)."""
        arguments = {STEP: attention}
        if self._selects:
            arguments["logits_to_keep"] = kept
        streaming = nullcontext() if self._streamer is None else self._streamer.step(len(token_ids))
        with streaming, torch.inference_mode():
            logits: torch.Tensor = self._model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, **arguments
            ).logits[0]
        return logits if self._selects else logits[kept]

    def until_ended(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention) -> None:
        with suppress(ForwardEnded):
            self(token_ids, positions, token_ids[:0], attention)
