"""Models with random weights: times and hits depend on shapes and tokens alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ragorder.eval.engines.base import EngineError
from ragorder.eval.engines.torch import TorchModel

__all__ = ["ONE_THREAD", "SHAPES", "ModelShape", "hardware"]

ONE_THREAD = "CPU, 1 thread"
"""On which CPU time is a measure of time."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder of one of transformers' families; `large` ones need a GPU."""

    name: str
    family: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    vocabulary: int
    longest_tokens: int = 32_768
    large: bool = False

    @property
    def obstacle(self) -> str | None:
        import torch

        if not self.large or torch.cuda.is_available():
            return None
        small = " or ".join(name for name, shape in SHAPES.items() if not shape.large)
        return f"the shape {self.name} needs a GPU, and there is none here: take shape {small}"

    def make(self) -> TorchModel:
        """Always with the same weights. Raises EngineError for a large model without a GPU."""
        if self.obstacle:
            raise EngineError(self.obstacle)
        return TorchModel.random(self.config())

    def config(self) -> Any:
        """As transformers has it."""
        from transformers import AutoConfig

        return AutoConfig.for_model(
            self.family,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.longest_tokens,
            sliding_window=None,
            tie_word_embeddings=False,
        )


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("tiny", "qwen2", 2, 128, 256, 2, 1, 512),
        ModelShape("small", "qwen2", 8, 512, 1_536, 8, 2, 8_192),
        ModelShape("qwen2.5-7b", "qwen2", 28, 3_584, 18_944, 28, 4, 152_064, large=True),
        ModelShape("mistral-7b", "mistral", 32, 4_096, 14_336, 32, 8, 32_000, large=True),
        ModelShape("llama2-7b", "llama", 32, 4_096, 11_008, 32, 32, 32_000, large=True),
    )
}
"""By name: the models of RAGCache's Table 1 and of RAGCache++ (appendix A), though Llama 2 takes no prompts of 32,768
tokens; "small" is as wide as prefill must be to dominate on a CPU; "tiny" is for tests."""


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    threads = torch.get_num_threads()
    return ONE_THREAD if threads == 1 else f"CPU, {threads} threads"
