"""Decoder layer that moves to another tier while steps run (RAGDoll 5)."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any


class LayerMove:
    """`fetch(stale)` brings the layer to `target`, and may stop once `stale()`. Any thread may `read`."""

    def __init__(self, layer: int, target: Any, fetch: Callable[[Callable[[], bool]], Any]) -> None:
        self.layer = layer
        self.target = target
        self.fetched: Any = None
        self.error: Exception | None = None
        self.done = False
        self._dropped = False
        self._fetch: Callable[[Callable[[], bool]], Any] | None = fetch
        self._reading = Lock()

    def read(self) -> None:
        """Bring the layer, without the engine's lock. Keep an error in `error`."""
        with self._reading:
            if self._fetch is None or self.done:
                return
            try:
                self.fetched = self._fetch(lambda: self._dropped)
            except Exception as error:
                self.error = error
            self.done = True

    def drop(self) -> None:
        """Wait for the end of a running read, after its current chunk."""
        self._dropped = True
        with self._reading:
            self._fetch = self.fetched = None
