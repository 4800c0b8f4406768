"""The links that make the source tree importable, where an sdist has unpacked it without them."""

from __future__ import annotations

import importlib
import os
from contextlib import suppress
from pathlib import Path

LINKED = ("trie", "pipelining", "kernels", "adapters", "eval", "benchmarks")


def restore_links(root: Path) -> None:
    """Sdists hold files alone. In a checkout nothing is missing, and nothing is done."""
    for folder in LINKED:
        link = root / "ragorder" / folder
        if (root / folder).is_dir() and link.parent.is_dir() and not os.path.lexists(link):
            with suppress(FileExistsError):
                link.symlink_to(f"../{folder}")
    importlib.invalidate_caches()
