"""Files of the toy models' weights."""

from __future__ import annotations

from pathlib import Path

SHIPPED = Path(__file__).parent


def checkpoint(folder: Path, seed: int) -> Path:
    return folder / f"chains-{seed}.safetensors"
