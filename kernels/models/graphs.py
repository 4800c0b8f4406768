"""Steps of few tokens as CUDA graphs.

A graph repeats shapes and addresses, so a step is padded to a `Bucket`, its tensors stay in place, and attention reads
lengths on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Self
from weakref import ref

import numpy as np
import torch

from ragorder.common.lru_cache import LRUCache
from ragorder.kernels.attention import PackedBatch
from ragorder.kernels.attention.attention import choose_backend
from ragorder.kernels.attention.batch import to_device
from ragorder.kernels.models.attention import PagedStep
from ragorder.kernels.models.batch import Forward, PackedStep, Piece
from ragorder.kernels.paging import BlockPool

MOST_TOKENS = 256
"""In larger steps the device takes longer than the host's launches."""
_LEAST_BLOCKS = 16
_GRAPHS = 64
_WARM_UPS = 2
"""Steps of a bucket before its capture, which compile its kernels."""

_log = logging.getLogger("ragorder.kernels.models")


class Bucket(NamedTuple):
    """Sizes of a padded step, powers of two; `query`: new tokens of a request, `blocks` of a table."""

    tokens: int
    requests: int
    query: int
    blocks: int

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Self | None:
        """Return the smallest bucket, or None for large or scattered steps."""
        counts = [len(piece.token_ids) for piece in pieces]
        if sum(counts) > MOST_TOKENS or any(piece.scattered for piece in pieces):
            return None
        tokens, query = _power(sum(counts)), _power(max(counts))
        padding = -(-(tokens - sum(counts)) // query)
        blocks = _power(max(_LEAST_BLOCKS, *(len(piece.table) for piece in pieces)))
        return cls(tokens, _power(len(pieces) + padding), query, blocks)


class FixedStep:
    """Tensors of a bucket's sizes, for one step after another. Padding tokens are requests without context, and write
    the first token's KV again."""

    def __init__(self, bucket: Bucket, pool: BlockPool) -> None:
        self._bucket = bucket
        self._pool = pool
        tokens, requests, _, blocks = bucket
        self._longs = torch.zeros(4 * tokens + requests, dtype=torch.int64, device=pool.device)
        self._shorts = torch.zeros(2 * requests + 1 + requests * blocks, dtype=torch.int32, device=pool.device)

    def fill(self, pieces: Sequence[Piece]) -> int:
        """Write the pieces. Return how many of the first logits belong to them."""
        shape, (tokens, requests, query, blocks) = self._pool.shape, self._bucket
        ends = [*accumulate(len(piece.token_ids) for piece in pieces)]
        longs = np.zeros(4 * tokens + requests, dtype=np.int64)
        ids, positions, slots, written, kept = np.split(longs, np.arange(1, 5) * tokens)
        starts = np.full(requests + 1, tokens, dtype=np.int32)
        # The last of the padding requests may be shorter.
        starts[: len(pieces)] = [0, *ends[:-1]]
        padded = np.arange(ends[-1], tokens, query)
        starts[len(pieces) : len(pieces) + len(padded)] = padded
        contexts = np.zeros(requests, dtype=np.int32)
        tables = np.zeros((requests, blocks), dtype=np.int32)
        for row, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
            own = slice(end - len(piece.token_ids), end)
            ids[own] = piece.token_ids
            positions[own] = np.arange(piece.start, piece.start + len(piece.token_ids))
            tables[row, : len(piece.table)] = piece.table
            contexts[row] = piece.start
            places, offsets = np.divmod(positions[own], shape.block_size)
            slots[own] = tables[row, places] * np.int64(self._pool.block_rows) + offsets
        written[: ends[-1]] = np.arange(ends[-1])
        slots[ends[-1] :] = slots[0]
        wanted = [end - 1 for piece, end in zip(pieces, ends, strict=True) if piece.wants_logits]
        kept[: len(wanted)] = wanted
        self._longs.copy_(to_device(longs, self._pool.device), non_blocking=True)
        shorts = np.concatenate((starts, contexts, tables.ravel()))
        self._shorts.copy_(to_device(shorts, self._pool.device), non_blocking=True)
        return len(wanted)

    @property
    def arguments(self) -> PackedStep:
        """Arguments of a forward that read what `fill` writes."""
        tokens, requests, query, blocks = self._bucket
        ids, positions, slots, written, kept = self._longs.split([tokens] * 4 + [requests])
        starts, contexts, tables = self._shorts.split([requests + 1, requests, requests * blocks])
        longest = blocks * self._pool.shape.block_size
        batch = PackedBatch(starts, contexts, tables.view(requests, blocks), query, longest)
        return PackedStep(ids, positions, kept, PagedStep(self._pool, batch, slots, written=written))


class GraphCapture:
    """Graphs of kernels in shared memory: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: Any = None

    @classmethod
    def of(cls, forward: Forward, pool: BlockPool) -> Self | None:
        """Return a capture, or None without GPU or Triton, or if weights stream."""
        if pool.device.type != "cuda" or forward.streams:
            return None
        cache = pool.views.key_caches[0]
        backend = choose_backend("auto", cache.new_empty(0, *cache.shape[2:]), cache.shape[1])
        return cls(pool.device) if backend == "triton" else None

    def capture(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Return a function that repeats `compute`'s kernels and returns the same tensor. Raises RuntimeError."""
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV meanwhile.
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"),
        ):
            logits = compute()
        self._memory = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        return replay

    def forget(self) -> None:
        """Free the memory, once no graph is left."""
        self._memory = None


class _Held:
    def __init__(self, step: FixedStep) -> None:
        self.step = step
        self.uses = 0
        self.replay: Callable[[], torch.Tensor] | None = None


class StepGraphs:
    """Graphs of `forward`; none without a `capture`."""

    def __init__(self, forward: Forward, pool: BlockPool, capture: GraphCapture | None) -> None:
        self._forward = forward
        self._pool = pool
        self._capture = capture
        self.clear()

    def clear(self) -> None:
        self._held: LRUCache[_Held] = LRUCache(_GRAPHS)
        if self._capture is not None:
            # A resized pool lies elsewhere.
            self._kv = ref(self._pool.kv)
            self._capture.forget()

    def compute(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """Return the wanted logits, or None without a bucket or a graph."""
        bucket = None if self._capture is None else Bucket.of(pieces)
        if bucket is None:
            return None
        if self._kv() is not self._pool.kv:
            self.clear()
        held = self._held.get(bucket)
        if held is None:
            held = _Held(FixedStep(bucket, self._pool))
            self._held.put(bucket, held)
        wanted = held.step.fill(pieces)
        if held.uses == _WARM_UPS and not self._captured(held):
            return None
        held.uses += 1
        logits = self._forward(*held.step.arguments) if held.replay is None else held.replay()
        # The next replay overwrites them.
        return logits[:wanted].clone()

    def _captured(self, held: _Held) -> bool:
        if self._capture is None:
            return False
        try:
            held.replay = self._capture.capture(lambda: self._forward(*held.step.arguments))
        except RuntimeError as error:
            _log.warning("steps run without CUDA graphs, slower: one could not be captured (%s)", error)
            self._capture = None
            self.clear()
            return False
        return True


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()
