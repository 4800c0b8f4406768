"""Language model with random weights, for engines without a download."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from ragorder.common.extras import needs
from ragorder.common.files import cache_folder
from ragorder.kernels.random_model.documentation import chunks_of, library_modules, read_entries
from ragorder.kernels.random_model.model import make_model

__all__ = ["has_fast_bfloat16", "make_model", "random_model", "standard_texts"]


def random_model(texts: Iterable[str] | None = None) -> Path:
    """Make a random model with a tokenizer for `texts` in the user's cache, just wide enough for prefill to dominate
    the time to first token. Return its folder. Raises ImportError."""
    with needs("torch", "making a model"):
        layers, hidden_size = (14, 1024) if has_fast_bfloat16() else (8, 512)
    folder = cache_folder() / f"random-{layers}x{hidden_size}"
    texts = standard_texts() if texts is None else texts
    return make_model(folder, texts=texts, layers=layers, hidden_size=hidden_size)


def has_fast_bfloat16() -> bool:
    import torch

    cpu = torch.cpu
    return bool(torch.cuda.is_available() or cpu._is_avx512_bf16_supported() or cpu._is_amx_tile_supported())


def standard_texts() -> Iterator[str]:
    for module, path in library_modules().items():
        for chunk in chunks_of(module, read_entries(module, path)):
            yield chunk.text
