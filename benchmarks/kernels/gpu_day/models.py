"""Folders of models in the shapes of 7B models: configurations and tokenizers; weights are drawn on loading."""

from __future__ import annotations

from pathlib import Path

from ragorder.benchmarks.kernels.embedded.models import SHAPES
from ragorder.common.files import cache_folder
from ragorder.eval.engines.torch import RANDOM_WEIGHTS
from ragorder.kernels.random_model import make_model
from ragorder.kernels.random_model.documentation import chunks_of, library_modules, read_entries

__all__ = ["shape_folder"]

_VOCABULARY = 8_192


def shape_folder(shape: str) -> Path:
    """In the user's cache; made if it is not there."""
    made, folder = SHAPES[shape], cache_folder() / f"shape-{shape}"
    if not (folder / RANDOM_WEIGHTS).is_file():
        modules = {module: read_entries(module, path) for module, path in library_modules().items()}
        texts = [chunk.text for module, entries in modules.items() for chunk in chunks_of(module, entries)]
        # The smallest model, for its tokenizer.
        make_model(folder, texts=texts, layers=1, hidden_size=64, vocab_size=min(_VOCABULARY, made.vocabulary))
        (folder / "model.safetensors").unlink(missing_ok=True)
        made.config().save_pretrained(folder)
        (folder / RANDOM_WEIGHTS).touch()
    return folder
