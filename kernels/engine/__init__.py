"""Embedded engine: a transformers model with documents' KV on three tiers."""

from __future__ import annotations

# First: its error names the extra to install.
import ragorder.kernels.models  # noqa: F401
from ragorder.kernels.cache import TierTokens
from ragorder.kernels.engine.engine import TieredEngine
from ragorder.kernels.engine.request import (
    Completion,
    DeviceLostError,
    FinishReason,
    Request,
    RequestRefusedError,
    Sampling,
    ShortOfMemoryError,
    TokenLogprobs,
    Update,
)
from ragorder.kernels.engine.stats import TBT_BOUNDS_S, EngineStats
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.fusion.selection import Fusion
from ragorder.kernels.models.loading import ModelLoadError
from ragorder.kernels.models.support import UnsupportedModelError

__all__ = [
    "TBT_BOUNDS_S",
    "Completion",
    "DeviceLostError",
    "EngineSettings",
    "EngineStats",
    "FinishReason",
    "Fusion",
    "ModelLoadError",
    "Request",
    "RequestRefusedError",
    "Sampling",
    "ShortOfMemoryError",
    "TierTokens",
    "TieredEngine",
    "TokenLogprobs",
    "UnsupportedModelError",
    "Update",
]
