"""What disks do to files."""

from __future__ import annotations

import os
import random
from pathlib import Path

_HEAD = 64
"""Bytes at the beginning of a file, which are hit as often as all others."""


def chunk_files(folder: Path) -> list[Path]:
    """The files of all chunks in a disk tier's folder, sorted; those that vanish meanwhile are left out."""
    return sorted(path for path in folder.glob("chunks/*/*.kv") if path.is_file())


def flip_bit(path: Path, rng: random.Random) -> bool:
    """One bit of a file, in place. Whether there was one."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return False
        place = rng.randrange(min(size, _HEAD) if rng.random() < 0.5 else size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))
    return True


def truncate(path: Path, rng: random.Random) -> bool:
    """Cut a file somewhere, to nothing now and then. Whether there was anything to cut."""
    size = path.stat().st_size
    if size:
        os.truncate(path, 0 if rng.random() < 0.2 else rng.randrange(size))
    return bool(size)


def damage(folder: Path, rng: random.Random, share: float = 0.1) -> int:
    """Flip a bit in, or truncate, about such a share of all chunks; how many that were."""
    return sum(
        (flip_bit if rng.random() < 0.5 else truncate)(path, rng)
        for path in chunk_files(folder)
        if rng.random() < share
    )
