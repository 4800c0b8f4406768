"""The path of a request through the knowledge tree, in vLLM's chunks."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.kv_offload.base import OffloadKey, ReqContext

__all__ = ["RequestPath", "path_of"]


class RequestPath:
    """The chunks of a request's prompt, root first; those of several groups of layers are adjacent."""

    __slots__ = ("_device", "_loaded", "_positions", "cost", "counted", "ends", "keys", "last", "places")

    def __init__(self, positions: dict[OffloadKey, int]) -> None:
        # vLLM's own, which grows while the request is answered.
        self._positions = positions
        self.keys: list[OffloadKey] = []
        self.ends: list[int] = []
        self.places: dict[OffloadKey, int] = {}
        self._device: int | None = None
        self._loaded = 0
        self.counted = False
        # The number of chunks that count as used; None: all.
        self.last: int | None = None
        self.cost: float | None = None
        self._read()

    def __contains__(self, key: object) -> bool:
        return key in self._positions

    def parent_of(self, key: OffloadKey) -> OffloadKey | None:
        """None for the first chunk, and for other requests' chunks."""
        place = self._place(key)
        return self.keys[place - 1] if place else None

    def looked_up(self, key: OffloadKey) -> None:
        """The device has everything before the first chunk looked up."""
        if self._device is None:
            self._device = self._place(key)

    def loaded(self, keys: Iterable[OffloadKey]) -> None:
        """From the tiers behind the device."""
        places = [place for key in keys if (place := self._place(key)) is not None]
        self._loaded = max([self._loaded, *(place + 1 for place in places)])

    @property
    def cached(self) -> int:
        """In chunks; all if vLLM looked up none."""
        return len(self.keys) if self._device is None else max(self._device, self._loaded)

    def counts(self, key: OffloadKey) -> bool:
        """The request was counted already, and with this chunk."""
        place = self._place(key)
        return self.counted and place is not None and (self.last is None or place < self.last)

    def before(self, end: int) -> int:
        """Chunks that end within `end` tokens."""
        return bisect_right(self.ends, end)

    def _place(self, key: OffloadKey) -> int | None:
        place = self.places.get(key)
        if place is None and key in self._positions:
            self._read()
            place = self.places.get(key)
        return place

    def _read(self) -> None:
        in_order = sorted(self._positions.items(), key=lambda chunk: chunk[1])
        self.keys = [key for key, _ in in_order]
        self.ends = [end for _, end in in_order]
        self.places = {key: place for place, key in enumerate(self.keys)}


def path_of(request: ReqContext) -> RequestPath:
    path: RequestPath | None = request.get_state(RequestPath)
    if path is None:
        # vLLM's public get_offload_key_position needs a key, and a manager never gets the keys of a request's chunks
        # that were on the device. They count as used all the same.
        path = RequestPath(request._offload_key_positions)
        request.set_state(path)
    return path
