"""Tiers of the decoder layers' weights (RAGDoll 4.2)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from ragorder.trie.residency.base import TierLevel


@dataclass(frozen=True, slots=True)
class LayerTiers:
    """The tier of each layer's weights between steps. Layers off the device are streamed."""

    places: tuple[TierLevel, ...]

    @classmethod
    def spread(cls, layers: int, device: int, host: int = 0) -> Self:
        """Space `device` and `host` layers evenly: the stream has time while resident ones are computed."""
        return cls((TierLevel.DISK,) * layers).with_counts(device, host)

    def with_counts(self, device: int, host: int) -> Self:
        """Return the residency with these numbers that reads the fewest layers, at even distances."""
        if device < 0 or host < 0 or device + host > len(self):
            raise ValueError(f"{device} layers on the device and {host} in the host exceed {len(self)} layers")
        places = list(self.places)

        def at(place: TierLevel) -> list[int]:
            return [layer for layer, now in enumerate(places) if now is place]

        def put(layers: list[int], count: int, place: TierLevel) -> None:
            for layer in _evenly(layers, count):
                places[layer] = place

        left = max(0, len(at(TierLevel.DEVICE)) - device)
        # What leaves the device is copied to the host, and not read, as long as there is room.
        to_host = min(left, max(0, host - len(at(TierLevel.HOST))))
        leaving = _evenly(at(TierLevel.DEVICE), left)
        for number, layer in enumerate(leaving):
            places[layer] = TierLevel.HOST if number < to_host else TierLevel.DISK
        missing = max(0, device - len(at(TierLevel.DEVICE)))
        from_host = min(missing, max(0, len(at(TierLevel.HOST)) - host))
        put(at(TierLevel.HOST), from_host, TierLevel.DEVICE)
        put(at(TierLevel.DISK), missing - from_host, TierLevel.DEVICE)
        put(at(TierLevel.HOST), max(0, len(at(TierLevel.HOST)) - host), TierLevel.DISK)
        put(at(TierLevel.DISK), max(0, host - len(at(TierLevel.HOST))), TierLevel.HOST)
        return type(self)(tuple(places))

    @classmethod
    def of_host(cls, layers: int, in_host: Collection[int]) -> Self:
        """Put these layers in host memory, the others on the device."""
        return cls(tuple(TierLevel.HOST if layer in in_host else TierLevel.DEVICE for layer in range(layers)))

    @property
    def in_host(self) -> tuple[int, ...]:
        return tuple(layer for layer, place in enumerate(self.places) if place is TierLevel.HOST)

    def __getitem__(self, layer: int) -> TierLevel:
        return self.places[layer]

    def __len__(self) -> int:
        return len(self.places)

    def count(self, place: TierLevel) -> int:
        return self.places.count(place)


def _evenly(layers: list[int], count: int) -> list[int]:
    return [layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count)]
