"""Residency of decoder layers over device, host and disk (RAGDoll 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

__all__ = ["Place", "Residency"]


class Place(Enum):
    """Where a layer's weights are between steps."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Residency:
    """The place of each layer. Those on the device are computed where they lie; the others are streamed."""

    places: tuple[Place, ...]

    @classmethod
    def spread(cls, layers: int, device: int, host: int = 0) -> Self:
        """So many layers on the device and in the host, at even distances: while one on the device is computed, the
        stream has time to spare. Raises ValueError for numbers that do not add up."""
        if device < 0 or host < 0 or device + host > layers:
            raise ValueError(f"{device} layers on the device and {host} in the host are not within {layers} layers")
        places = [Place.DISK] * layers
        for layer in _evenly(range(layers), device):
            places[layer] = Place.DEVICE
        for layer in _evenly([layer for layer in range(layers) if places[layer] is Place.DISK], host):
            places[layer] = Place.HOST
        return cls(tuple(places))

    def __getitem__(self, layer: int) -> Place:
        return self.places[layer]

    def __len__(self) -> int:
        return len(self.places)

    def count(self, place: Place) -> int:
        return self.places.count(place)


def _evenly(layers: range | list[int], count: int) -> list[int]:
    return [layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count)]
