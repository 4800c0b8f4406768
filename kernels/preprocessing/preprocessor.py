"""Prefill of documents after a system prompt and neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ragorder.kernels.engine.selecting import check_fusion
from ragorder.kernels.fusion.assemble import moved_rows, read_rows
from ragorder.kernels.fusion.rotation import Rotation
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.paging import BlockPool
from ragorder.kernels.preprocessing.manifest import BuildError


@dataclass(frozen=True, slots=True)
class Prefill:
    token_ids: Sequence[int]
    neighbours: Sequence[torch.Tensor] = ()

    @property
    def context_tokens(self) -> int:
        return sum(len(each) for each in self.neighbours)


class Preprocessor:
    """KV (tokens, layers, 2, KV heads, head_dim) of documents, as if directly after the system prompt.

    A document is computed after the system prompt and its neighbours, whose keys are rotated to their positions; then
    its own are rotated back (FusionRAG, Eq. 5 and 10). At most `workspace_tokens` are computed together.
    """

    def __init__(
        self, model: PatchedModel, prefix: Sequence[int], *, workspace_tokens: int, max_batch_tokens: int = 8192
    ) -> None:
        if not prefix:
            raise ValueError("the system prompt is empty: give one")
        blocks = workspace_tokens // model.shape.block_size
        self._model = model
        check_fusion(model.model)
        self._rotation = Rotation.of(model.model)
        self._rotation.verify(model.model)
        self._pool = BlockPool(model.shape, blocks, model.device)
        self._max_batch_tokens = max_batch_tokens
        self.longest = min(blocks * model.shape.block_size, model.longest or blocks * model.shape.block_size)
        self.workspace_tokens = blocks * model.shape.block_size
        if len(prefix) >= self.longest:
            raise ValueError(
                f"the system prompt has {len(prefix)} tokens, but only {self.longest} fit in total: shorten it"
            )
        self.prefix: torch.Tensor = torch.empty(0)
        self._prefix_tokens = 0
        (self.prefix,) = self.compute([Prefill(prefix)])
        self._prefix_tokens = len(prefix)

    def room(self, prefill_tokens: int, context_tokens: int) -> int:
        size = self._model.shape.block_size
        return -(-(self._prefix_tokens + context_tokens + prefill_tokens) // size) * size

    def compute(self, prefills: Sequence[Prefill]) -> list[torch.Tensor]:
        with torch.inference_mode():
            placed = self._place(prefills)
            for pieces in self._steps(placed):
                self._model.forward(*pack(pieces, self._pool))
            return [self._take(each) for each in placed]

    def _place(self, prefills: Sequence[Prefill]) -> list[_Placed]:
        size, first = self._model.shape.block_size, 0
        placed: list[_Placed] = []
        for prefill in prefills:
            blocks = self.room(len(prefill.token_ids), prefill.context_tokens) // size
            if first + blocks > self._pool.blocks:
                raise ValueError(f"{len(prefills)} documents do not fit into {self.workspace_tokens} tokens")
            each = _Placed(
                prefill.token_ids, self._prefix_tokens + prefill.context_tokens, range(first, first + blocks)
            )
            self._write(prefill, each)
            placed.append(each)
            first += blocks
        return placed

    def _write(self, prefill: Prefill, placed: _Placed) -> None:
        if not placed.start:
            return
        parts, position = [self.prefix], self._prefix_tokens
        for kv in prefill.neighbours:
            parts.append(moved_rows(kv.to(self._pool.device), self._prefix_tokens, position, self._rotation))
            position += len(kv)
        rows = torch.cat(parts)
        padded = rows.new_zeros(len(placed.blocks) * self._model.shape.block_size, *rows.shape[1:])
        padded[: len(rows)] = rows
        blocks = self._pool.kv[placed.blocks.start : placed.blocks.stop]
        blocks.copy_(padded.unflatten(0, (len(blocks), -1)).permute(0, 2, 3, 1, 4, 5))

    def _steps(self, placed: Sequence[_Placed]) -> Iterator[list[Piece]]:
        pieces: list[Piece] = []
        left = self._max_batch_tokens
        for each in placed:
            begin = 0
            while begin < len(each.token_ids):
                end = min(begin + left, len(each.token_ids))
                pieces.append(Piece(each.token_ids[begin:end], each.start + begin, list(each.blocks), False))
                left -= end - begin
                begin = end
                if not left:
                    yield pieces
                    pieces, left = [], self._max_batch_tokens
        if pieces:
            yield pieces

    def _take(self, placed: _Placed) -> torch.Tensor:
        own = read_rows(self._pool, placed.blocks, placed.start, placed.start + len(placed.token_ids))
        return moved_rows(own, placed.start, self._prefix_tokens, self._rotation)


@dataclass(frozen=True, slots=True)
class _Placed:
    token_ids: Sequence[int]
    start: int
    blocks: range


def check_numbers(what: str, kv: torch.Tensor) -> None:
    """Raises BuildError for NaN or inf, which would fail all requests with this KV."""
    if not bool(kv.isfinite().all()):
        raise BuildError(
            f"the KV of {what} contains NaN or inf (overflow, or bad weights): build with another dtype in another "
            "folder, or leave it out"
        )
