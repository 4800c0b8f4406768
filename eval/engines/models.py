"""Models of real engines, and their tokenizers."""

from __future__ import annotations

from pathlib import Path

from ragorder.adapters.openai.tokenizer import load_tokenizer
from ragorder.eval.data.cache import cache_folder
from ragorder.eval.data.corpora import load_pydocs
from ragorder.eval.engines.prompts import SYSTEM_PROMPT, BuiltPrompts
from ragorder.eval.engines.tiny_model import make_model
from ragorder.eval.engines.vllm import has_fast_bfloat16
from ragorder.prompt import PromptBuilder

__all__ = ["built_prompts", "load_tokenizer", "longest_prompt", "random_model"]


def random_model() -> Path:
    """A model with random weights and a tokenizer trained on the standard library's documentation.

    Just wide enough for prefill to dominate the time to first token. Raises ImportError naming the extra to install."""
    try:
        layers, hidden_size = (14, 1024) if has_fast_bfloat16() else (8, 512)
    except ImportError as error:
        raise ImportError("making a model needs torch: pip install 'ragorder[torch]'") from error
    folder = cache_folder() / f"random-{layers}x{hidden_size}"
    texts = [document.text for document in load_pydocs(cache=cache_folder()).documents]
    return make_model(folder, texts=texts, layers=layers, hidden_size=hidden_size)


def longest_prompt(model: str | Path) -> int:
    """The model's limit in tokens, very large if unknown. Raises as `load_tokenizer`."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise ImportError("a model's configuration needs transformers: pip install 'ragorder[tokenizer]'") from error
    config = AutoConfig.from_pretrained(model).get_text_config()
    return int(getattr(config, "max_position_embeddings", 1 << 20))


def built_prompts(model: str | Path) -> BuiltPrompts:
    """Raises as `load_tokenizer`."""
    return BuiltPrompts(PromptBuilder(SYSTEM_PROMPT, tokenizer=load_tokenizer(model)))
