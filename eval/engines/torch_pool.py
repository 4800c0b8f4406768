"""Pool of embedded engines on one model."""

from __future__ import annotations

from pathlib import Path

from ragorder.eval.engines.pool import EnginePool, EngineSize
from ragorder.eval.engines.torch import TorchEngine, TorchModel, need_torch

__all__ = ["TorchPool"]


class TorchPool(EnginePool[TorchEngine]):
    """Engines with KV of their own, `host_tokens` behind each device, and common weights. Raises ImportError."""

    block_size = 16

    def __init__(self, host_tokens: int = 0) -> None:
        need_torch()
        super().__init__()
        self._host_tokens = host_tokens
        self._loaded: tuple[Path, TorchModel] | None = None

    def start(self, size: EngineSize, *, prefix_caching: bool) -> TorchEngine:
        if self._loaded is None or self._loaded[0] != size.model:
            self._loaded = size.model, TorchModel.load(size.model)
        engine = TorchEngine(
            self._loaded[1],
            block_size=size.block_size,
            capacity_tokens=size.capacity_tokens,
            host_tokens=self._host_tokens,
            prefix_caching=prefix_caching,
            max_model_len=size.longest_tokens,
            output_tokens=size.output_tokens,
            unlimited_tokens=size.unlimited_tokens,
        )
        engine.warm_up()
        return engine
