"""Embeddings of scripted texts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ragorder.benchmarks.hedra.workflows.script import without_marks

__all__ = ["Embedder"]

Vectors = NDArray[np.float32]


class Embedder:
    """Vectors of texts without their marks, shape (1, dimensions), each embedded once. `save` keeps them in `file`."""

    def __init__(self, encode: Callable[[Sequence[str]], Vectors], file: Path | None = None) -> None:
        self._encode = encode
        self._file = file
        self._known: dict[str, Vectors] = {}
        self._saved = 0
        if file is not None:
            with suppress(OSError, ValueError), np.load(file) as kept:
                self._known = dict(zip(kept["keys"].tolist(), kept["vectors"][:, None], strict=True))
                self._saved = len(self._known)

    def __call__(self, text: str) -> Vectors:
        text = without_marks(text)
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        if key not in self._known:
            self._known[key] = self.anew(text)
        return self._known[key]

    def anew(self, text: str) -> Vectors:
        """Computed, whether it is known or not."""
        return np.ascontiguousarray(self._encode([without_marks(text)]), dtype=np.float32)

    def save(self) -> None:
        if self._file is None or len(self._known) == self._saved:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._file.with_suffix(f".{os.getpid()}.npz")
        np.savez(unfinished, keys=list(self._known), vectors=np.concatenate(list(self._known.values())))
        unfinished.replace(self._file)
        self._saved = len(self._known)
