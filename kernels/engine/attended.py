"""Attention of a request's own tokens over all layers: what a second round of selection goes by."""

from __future__ import annotations

import torch
from torch import Tensor

from ragorder.kernels.attention.weights import Keys, Queries, attention_received
from ragorder.kernels.engine.attention import PagedLayers, PagedStep
from ragorder.kernels.engine.batch import Piece, pack
from ragorder.kernels.engine.forward import Forward, ForwardEnded

__all__ = ["attended"]


def attended(forward: Forward, layers: PagedLayers, piece: Piece, device: torch.device | str) -> Tensor:
    """fp32 (keys,): attention that each key in the piece's context receives from its rows at `positions`, summed over
    the rows, mean over heads and layers. Their KV is written."""
    step = pack([piece], layers, device)
    attention = _AllLayers(step.attention, layers, step.positions, piece)
    forward.until_ended(step.token_ids, step.positions, attention)
    return attention.total / len(layers.key_caches)


class _AllLayers:
    """A step's attention (`inner`) that also sums what its rows attend to, and ends in the last layer."""

    def __init__(self, inner: PagedStep, layers: PagedLayers, positions: Tensor, piece: Piece) -> None:
        self._inner = inner
        self._layers = layers
        self._positions = positions
        self._table = torch.as_tensor(piece.table, dtype=torch.int64, device=positions.device)
        self.total = torch.zeros(piece.context, device=positions.device)

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
        keys = Keys(self._layers.key_caches[layer], self._table, len(self.total))
        self.total += attention_received(Queries(query, self._positions, scale, window, softcap), keys)
        if layer == len(self._layers.key_caches) - 1:
            raise ForwardEnded
        return out
