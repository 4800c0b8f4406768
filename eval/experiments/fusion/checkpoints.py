"""Trained chain models in a folder: by default those that come with the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SHIPPED", "checkpoint"]

SHIPPED = Path(__file__).parent


def checkpoint(folder: Path, hops: int, seed: int) -> Path:
    """The model for questions of up to so many hops."""
    return folder / f"chains-{hops}-hops-{seed}.safetensors"
