"""Loading of a served model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ragorder.extras import needs

__all__ = ["load_tokenizer"]


def load_tokenizer(model: str | Path) -> Any:
    """Return the tokenizer of a model, by its folder or its name on the Hub.

    Raises ImportError naming the extra to install, OSError or ValueError if there is no such tokenizer.
    """
    with needs("tokenizer", "a tokenizer"):
        from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(model)
