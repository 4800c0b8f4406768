"""Models of real engines, and their tokenizers."""

from __future__ import annotations

from pathlib import Path

from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.common.extras import needs
from ragorder.common.files import cache_folder
from ragorder.eval.data.corpora import load_pydocs
from ragorder.eval.engines.prompts import SYSTEM_PROMPT, BuiltPrompts
from ragorder.eval.engines.vllm import set_environment
from ragorder.kernels import random_model as kernels
from ragorder.prompt import PromptBuilder


def random_model() -> Path:
    """As in `ragorder.kernels.random_model`, with the texts of the corpus pydocs at hand."""
    set_environment()
    return kernels.random_model(document.text for document in load_pydocs(cache=cache_folder()).documents)


def longest_prompt(model: str | Path) -> int:
    """The model's limit in tokens, very large if unknown. Raises as `load_tokenizer`."""
    with needs("torch", "a model's configuration"):
        from transformers import AutoConfig
    config = AutoConfig.from_pretrained(model).get_text_config()
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def built_prompts(model: str | Path, system: str = SYSTEM_PROMPT) -> BuiltPrompts:
    """Raises as `load_tokenizer`."""
    return BuiltPrompts(PromptBuilder(system, tokenizer=load_tokenizer(model)))
