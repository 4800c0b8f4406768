"""Trained chain models in a folder: by default those that come with the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["SHIPPED", "checkpoint", "earlier"]

SHIPPED = Path(__file__).parent


def checkpoint(folder: Path, hops: int, seed: int) -> Path:
    """The model for questions of up to so many hops."""
    return folder / f"chains-{hops}-hops-{seed}.safetensors"


def earlier(start: str, hops: int, seed: int) -> tuple[int, Path] | None:
    """The model of the most hops, at most so many, in the folder `start` ("shipped": the package's), and its hops."""
    folder = SHIPPED if start == "shipped" else Path(start)
    paths = ((known, checkpoint(folder, known, seed)) for known in range(hops, 1, -1))
    return next(((known, path) for known, path in paths if path.is_file()), None)
