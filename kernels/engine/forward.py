"""Forward of a transformers model over a packed step."""

from __future__ import annotations

import inspect
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ragorder.kernels.engine.attention import STEP, StepAttention
from ragorder.kernels.offload.stream import LayerStreamer

__all__ = ["Forward", "ForwardEnded"]


class ForwardEnded(Exception):  # noqa: N818
    """Raised by a step's attention to which the rest of the forward is of no use."""


class Forward:
    """Calls a causal language model with the step's attention; logits are scaled and capped as by its own forward.
    `streamer`: of its layers' weights, if they stream."""

    def __init__(self, model: Any, streamer: LayerStreamer | None = None) -> None:
        self._model = model
        self._streamer = streamer
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, kept: torch.Tensor, attention: StepAttention
    ) -> torch.Tensor:
        """token_ids, positions int64 (T,), kept int64 (N,): tokens whose logits are wanted; (N, vocabulary)."""
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
        """Without logits, up to the layer in which `attention` raises ForwardEnded."""
        with suppress(ForwardEnded):
            self(token_ids, positions, token_ids[:0], attention)
