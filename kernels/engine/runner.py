"""What a step computes, from the scheduler's chunks to the next tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragorder.kernels.engine.attention import PagedLayers
from ragorder.kernels.engine.batch import Piece, pack
from ragorder.kernels.engine.forward import Forward
from ragorder.kernels.engine.sampling import Choice, choose
from ragorder.kernels.engine.scheduler import Chunk

__all__ = ["Runner"]


class Runner:
    """One packed forward a step, over the pool of `layers`."""

    def __init__(self, forward: Forward, layers: PagedLayers, device: torch.device) -> None:
        self.forward = forward
        self._layers = layers
        self._device = device

    def compute(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[Choice]]:
        """The logits of the sequences that get a token, (N, vocabulary), and these tokens, in the order of chunks."""
        pieces = [self._piece(chunk) for chunk in chunks]
        step = pack(pieces, self._layers, self._device)
        logits = self.forward(step.token_ids, step.positions, step.kept, step.attention)
        chosen = [chunk.sequence for chunk in chunks if chunk.last]
        if not chosen:
            return logits, []
        samplings = [sequence.request.sampling for sequence in chosen]
        with torch.inference_mode():
            return logits, choose(logits, samplings, [sequence.random for sequence in chosen])

    def _piece(self, chunk: Chunk) -> Piece:
        sequence, start = chunk.sequence, chunk.sequence.computed
        table = sequence.table(self._layers.block_size)
        return Piece(sequence.tokens[start : start + chunk.tokens], start, table, chunk.last)
