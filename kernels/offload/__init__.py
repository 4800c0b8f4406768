"""Decoder layers streamed from host memory and disk (RAGDoll 4.2, 4.3)."""

from __future__ import annotations

from ragorder.common.extras import needs

with needs("torch", "streaming weights"):
    import torch  # noqa: F401
    import transformers  # noqa: F401

from ragorder.kernels.offload.checkpoint import Checkpoint, CheckpointError, LayerReadError
from ragorder.kernels.offload.model_memory import ModelMemory
from ragorder.kernels.offload.residency import LayerTiers
from ragorder.kernels.offload.store import LayerStore
from ragorder.kernels.offload.stream import LayerStreamer, StreamStats

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "LayerReadError",
    "LayerStore",
    "LayerStreamer",
    "LayerTiers",
    "ModelMemory",
    "StreamStats",
]
