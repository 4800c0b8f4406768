"""Pool of vLLMs in this process."""

from __future__ import annotations

from ragorder.eval.engines.pool import EnginePool, EngineSize
from ragorder.eval.engines.vllm import VLLMEngine

__all__ = ["VLLMPool"]


class VLLMPool(EnginePool[VLLMEngine]):
    """They are closed together (see `VLLMEngine`)."""

    block_size = 32

    def start(self, size: EngineSize, *, prefix_caching: bool) -> VLLMEngine:
        engine = VLLMEngine(
            size.model,
            block_size=size.block_size,
            capacity_tokens=size.capacity_tokens,
            prefix_caching=prefix_caching,
            max_model_len=size.longest_tokens,
            output_tokens=size.output_tokens,
            unlimited_tokens=size.unlimited_tokens,
        )
        engine.warm_up()
        return engine
