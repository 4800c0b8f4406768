"""The error for models that cannot be served."""

from __future__ import annotations

from ragorder.errors import RagorderError

__all__ = ["UnsupportedModelError"]


class UnsupportedModelError(RagorderError, ValueError):
    """A model cannot be served exactly, or cannot reuse documents' KV at other positions; the message has the
    reasons."""
