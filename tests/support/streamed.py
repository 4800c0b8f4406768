"""Models in folders, and budgets in which so many of their layers have room."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragorder.kernels.engine import EngineSettings

STEP = 64
TOKENS = 1024
# Of a layer's parameters in a buffer, at most.
_ALIGNMENT = 16 * 512


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def room_for(folder: Path, layers: int, *, tokens: int = TOKENS, requests: int = 64) -> int:
    """Device bytes for so many layers, a step, and the KV of so many tokens."""
    from transformers import AutoConfig

    from ragorder.kernels.offload import ModelMemory

    size = ModelMemory.of(AutoConfig.from_pretrained(folder))
    slot = max(size.layers) + _ALIGNMENT
    return size.outside + layers * slot + size.workspace(STEP, requests) + tokens * size.kv_token


def streaming(folder: Path, layers: int, **settings: Any) -> EngineSettings:
    """Settings of an engine with room for so many layers on the device, those of the ring included."""
    from ragorder.kernels.engine import EngineSettings

    options: dict[str, Any] = {"host_bytes": 0, "device_tokens": TOKENS, "max_batch_tokens": STEP} | settings
    if "device_bytes" not in options:
        options["device_bytes"] = room_for(folder, layers, tokens=options["device_tokens"])
    return EngineSettings(**options)


def whole(**settings: Any) -> EngineSettings:
    """Settings of the same engine on the whole model."""
    from ragorder.kernels.engine import EngineSettings

    return EngineSettings(**{"host_bytes": 0, "device_tokens": TOKENS, "max_batch_tokens": STEP} | settings)
