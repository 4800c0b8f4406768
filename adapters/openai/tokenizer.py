"""Loading of a served model's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(model: str | Path) -> Any:
    """Load from a folder or the Hub. Raises ImportError, OSError or ValueError."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        message = f"a tokenizer needs {error.name}: pip install 'transformers>=5' 'jinja2>=3.1'"
        raise ImportError(message, name=error.name) from error
    return AutoTokenizer.from_pretrained(model)
