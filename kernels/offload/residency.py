"""Residency of decoder layers on device, host and disk (RAGDoll 4.2)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Self

__all__ = ["Place", "Residency"]


class Place(Enum):
    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Residency:
    """The tier of each layer's weights between steps. Layers off the device are streamed."""

    places: tuple[Place, ...]

    @classmethod
    def spread(cls, layers: int, device: int, host: int = 0) -> Self:
        """Put `device` and `host` layers at even distances: the stream has time while resident ones are computed."""
        if device < 0 or host < 0 or device + host > layers:
            raise ValueError(f"{device} layers on the device and {host} in the host exceed {layers} layers")
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
