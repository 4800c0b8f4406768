"""Attention across documents, measured while their KV is computed (Cache-Craft)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragorder.kernels.attention.weights import Keys, Queries, attention_share
from ragorder.kernels.engine.attention import PagedLayers, StepAttention
from ragorder.kernels.engine.batch import Piece

__all__ = ["CrossAttention"]


class CrossAttention:
    """A step's attention (`inner`, which writes its KV into the pool) that also measures what crosses documents.

    `documents`: of each piece, the tokens in front of its documents, and their ends. All keys are read once more in
    each layer.
    """

    def __init__(
        self,
        inner: StepAttention,
        layers: PagedLayers,
        pieces: Sequence[Piece],
        documents: Sequence[tuple[int, Sequence[int]]],
        device: torch.device | str,
    ) -> None:
        self._inner = inner
        self._layers = layers
        self._measured = 0
        self._parts = [
            _Part(piece, prefix, ends, device) for piece, (prefix, ends) in zip(pieces, documents, strict=True)
        ]

    @property
    def shares(self) -> list[Tensor]:
        """fp32 (tokens,) of each piece: share of a token's attention that goes to documents in front of its own, mean
        over heads and layers."""
        return [part.total / max(1, self._measured) for part in self._parts]

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        out = self._inner.attend(layer, query, key, value, scale=scale, window=window, softcap=softcap)
        own = query.split([len(part.positions) for part in self._parts])
        for part, rows in zip(self._parts, own, strict=True):
            part.add(Queries(rows, part.positions, scale, window, softcap), self._layers.key_caches[layer])
        self._measured += 1
        return out


class _Part:
    """One sequence's tokens of the step, and the keys of other documents that they may attend to."""

    def __init__(self, piece: Piece, prefix: int, ends: Sequence[int], device: torch.device | str) -> None:
        self._tokens = piece.start + len(piece.token_ids)
        self._table = torch.as_tensor(piece.table, dtype=torch.int64, device=device)
        self.positions = torch.arange(piece.start, self._tokens, device=device)
        self.total = torch.zeros(len(piece.token_ids), device=device)
        self._low = torch.full_like(self.positions, prefix)
        begins = torch.tensor([prefix, *ends], device=device)
        self._high = begins[(self.positions[:, None] >= begins[1:]).sum(1)]

    def add(self, queries: Queries, cache: Tensor) -> None:
        self.total += attention_share(queries, Keys(cache, self._table, self._tokens), self._low, self._high)
