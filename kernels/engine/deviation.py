"""Deviation of KV from full attention's (CacheBlend; FusionRAG, Eq. 7 and 8)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ragorder.kernels.engine.attention import PagedLayers, StepAttention
from ragorder.kernels.engine.batch import Piece, pack
from ragorder.kernels.engine.forward import Forward, ForwardEnded

__all__ = ["kv_deviation"]


def kv_deviation(
    forward: Forward, layers: PagedLayers, piece: Piece, device: torch.device | str, most_tokens: int
) -> Tensor:
    """fp32 (tokens,): |ΔK|² + |ΔV|² of the piece's tokens between full attention and the pool in the second layer.

    The `start` tokens in front of it have exact KV. That of its own tokens in the first layer is written, so they may
    have none: there it depends on no other token, and so is also what was taken over. At most `most_tokens` at a time.
    """
    if len(layers.key_caches) < 2:
        return torch.zeros(len(piece.token_ids), device=device)
    parts = []
    for begin in range(0, len(piece.token_ids), most_tokens):
        chunk = replace(piece, token_ids=piece.token_ids[begin : begin + most_tokens], start=piece.start + begin)
        step = pack([chunk], layers, device)
        attention = _SecondLayer(step.attention, layers, step.positions, piece)
        forward.until_ended(step.token_ids, step.positions, attention)
        parts.append(attention.deviation)
    return torch.cat(parts)


class _SecondLayer:
    """Attention of the first layer, that ends in the second with the distance of its KV from the pool's."""

    deviation: Tensor

    def __init__(self, inner: StepAttention, layers: PagedLayers, positions: Tensor, piece: Piece) -> None:
        self._inner = inner
        self._layers = layers
        table = torch.as_tensor(piece.table, dtype=torch.int64, device=positions.device)
        self._places = table[positions // layers.block_size], positions % layers.block_size

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
        if not layer:
            return self._inner.attend(layer, query, key, value, scale=scale, window=window, softcap=softcap)
        old_key, old_value = (
            caches[layer][self._places] for caches in (self._layers.key_caches, self._layers.value_caches)
        )
        self.deviation = _distance(key, old_key) + _distance(value, old_value)
        raise ForwardEnded


def _distance(new: Tensor, old: Tensor) -> Tensor:
    return (new.float() - old.float()).square().sum((1, 2))
