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
from ragorder.kernels.attention.batch import to_device
from ragorder.kernels.attention.runs import Runs
from ragorder.kernels.models.attention import STEP, PagedStep, ScatteredRows, StepAttention
from ragorder.kernels.offload.stream import LayerStreamer
from ragorder.kernels.paging import BlockPool, Gathered, KVPositions, StepBlocks

_Ints = np.ndarray[tuple[int], np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of one sequence after `start` tokens in the blocks of `table` (or at `places`); `wants_logits` of the
    last one. `positions` of scattered tokens begin with `start`; those between them have KV."""

    token_ids: Sequence[int]
    start: int
    table: Sequence[int] | _Ints
    wants_logits: bool
    positions: Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int64]] | None = None
    places: KVPositions | None = None

    @property
    def scattered(self) -> bool:
        return self.positions is not None or self.places is not None

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self.positions is None:
            return np.arange(self.start, self.start + len(self.token_ids))
        return np.asarray(self.positions, dtype=np.int64)

    @property
    def context(self) -> int:
        """Tokens to attend to, including new ones only if scattered."""
        return int(self.rows.max()) + 1 if self.scattered else self.start

    def gather(self, pool: BlockPool, tokens: int) -> Gathered:
        """Return the first `tokens` positions' KV."""
        places = self.places or KVPositions.of(self.table, tokens, pool.shape.block_size)
        return Gathered(pool, [places], [tokens])


class PackedStep(NamedTuple):
    """Arguments of a forward, with logits in the order of the pieces."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor
    attention: PagedStep


def pack(pieces: Sequence[Piece], pool: BlockPool) -> PackedStep:
    shape, device = pool.shape, pool.device
    # Scattered rows come last, so that the attention of the other pieces ignores them.
    order = sorted(range(len(pieces)), key=lambda place: pieces[place].scattered)
    packed = [pieces[place] for place in order]
    counts = [len(piece.token_ids) for piece in packed]
    starts = [0, *accumulate(counts)]
    total = starts[-1]
    tables = [np.asarray(piece.table, dtype=np.int32) for piece in packed]
    last = dict(zip(order, starts[1:], strict=True))
    ends = [last[place] - 1 for place, piece in enumerate(pieces) if piece.wants_logits]
    # Tokens, positions, slots (-1: not written), and tokens with logits.
    long = np.empty(3 * total + len(ends), dtype=np.int64)
    for piece, table, start, count in zip(packed, tables, starts, counts, strict=False):
        positions = piece.rows
        long[start : start + count] = piece.token_ids
        long[total + start : total + start + count] = positions
        if piece.places is None:
            blocks, offsets = np.divmod(positions, shape.block_size)
            slots = table[blocks] * np.int64(pool.block_rows) + offsets
        else:
            slots = piece.places.blocks[positions] * pool.block_rows + piece.places.offsets[positions]
            slots[piece.places.origins[positions] >= 0] = -1
        long[2 * total + start : 2 * total + start + count] = slots
    long[3 * total :] = ends

    adjacent = sum(not piece.scattered for piece in packed)
    contexts = [piece.context for piece in packed]
    batch = PackedBatch.pack(counts[:adjacent], contexts[:adjacent], tables[:adjacent], device)
    longs = to_device(long, device)
    token_ids, positions_, to, kept = longs.split([total, total, total, len(ends)])
    moved = _step_blocks(packed, tables, long[2 * total : 3 * total], pool) if pool.copied else None
    if adjacent == len(packed):
        return PackedStep(token_ids, positions_, kept, PagedStep(pool, batch, to, blocks=moved))
    places = [
        piece.places or KVPositions.of(piece.table, piece.context, shape.block_size) for piece in packed[adjacent:]
    ]
    rows = [each.rows(pool)[:context] for each, context in zip(places, contexts[adjacent:], strict=True)]
    moves = [each.moves[:context] for each, context in zip(places, contexts[adjacent:], strict=True)]
    turning = next((each.turning for each in places if each.turning is not None), None)
    reading, runs = Runs.pack(rows, moves, [piece.rows for piece in packed[adjacent:]], device)
    turn = None if turning is None else turning.turn(-runs.moves)
    scattered = ScatteredRows(reading, positions_[starts[adjacent] :].int(), runs, turn)
    written = None
    if (long[2 * total : 3 * total] < 0).any():
        written = to_device(np.flatnonzero(long[2 * total : 3 * total] >= 0), device)
        to = to[written]
    return PackedStep(token_ids, positions_, kept, PagedStep(pool, batch, to, scattered, written, moved))


def _step_blocks(
    pieces: Sequence[Piece], tables: Sequence[_Ints], slots: np.ndarray[Any, np.dtype[np.int64]], pool: BlockPool
) -> StepBlocks:
    # Attention may load a whole table, and block 0 where tables are padded.
    elsewhere = [piece.places.blocks for piece in pieces if piece.places is not None]
    read = np.unique(np.concatenate([np.zeros(1, dtype=np.int64), *tables, *elsewhere]))
    written = np.unique(slots[slots >= 0] // pool.block_rows)
    return StepBlocks(read.tolist(), written.tolist())


class ForwardEnded(Exception):  # noqa: N818
    """A step's attention raises this once the rest is not needed."""


class Forward:
    """A causal language model, called with a step's attention."""

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
