"""The error for models that cannot be served."""

from __future__ import annotations

__all__ = ["UnsupportedModelError"]


class UnsupportedModelError(ValueError):
    """A model cannot be served exactly, or its documents' KV not be reused elsewhere; the message has the reasons."""
