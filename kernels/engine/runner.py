"""Computation of a step's chunks."""

from __future__ import annotations

import numpy as np
import torch

from ragorder.kernels.engine.attention import PagedLayers
from ragorder.kernels.engine.batch import Forward, Piece, pack
from ragorder.kernels.engine.sampling import SampledToken, choose
from ragorder.kernels.engine.scheduler import ScheduledChunk

__all__ = ["ModelRunner"]


class ModelRunner:
    def __init__(self, forward: Forward, layers: PagedLayers, device: torch.device) -> None:
        self.forward = forward
        self._layers = layers
        self._device = device

    def compute(self, chunks: list[ScheduledChunk]) -> tuple[torch.Tensor, list[SampledToken]]:
        """Return the next token, with logits, of each chunk that is its sequence's last."""
        packed = [chunk for chunk in chunks if not chunk.selects]
        found = self._compute(packed) if packed else (torch.empty(0), [])
        # After the other chunks: they may compute documents before a question.
        for chunk in chunks:
            if chunk.selects and chunk.sequence.selecting is not None:
                chunk.sequence.selecting.compute()
        return found

    def _compute(self, chunks: list[ScheduledChunk]) -> tuple[torch.Tensor, list[SampledToken]]:
        step = pack([self._piece(chunk) for chunk in chunks], self._layers, self._device)
        logits = self.forward(step.token_ids, step.positions, step.kept, step.attention)
        chosen = [chunk.sequence for chunk in chunks if chunk.last]
        if not chosen:
            return logits, []
        samplings = [sequence.request.sampling for sequence in chosen]
        with torch.inference_mode():
            return logits, choose(logits, samplings, [sequence.draw for sequence in chosen])

    def recover(self) -> None:
        """Raise the device's error if it persists."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.synchronize(self._device)

    def _piece(self, chunk: ScheduledChunk) -> Piece:
        sequence, table = chunk.sequence, chunk.sequence.table(self._layers.block_size)
        positions = sequence.positions(chunk.tokens)
        start, end = int(positions[0]), int(positions[-1]) + 1
        if np.array_equal(positions, np.arange(start, end)):
            return Piece(sequence.tokens[start:end], start, table, chunk.last)
        token_ids = [sequence.tokens[place] for place in positions]
        return Piece(token_ids, start, table, chunk.last, positions)
