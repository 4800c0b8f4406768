"""Cache folder of models, corpora and profiles."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/ragorder, or ~/.cache/ragorder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragorder"
