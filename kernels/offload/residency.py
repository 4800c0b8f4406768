"""Tiers of the decoder layers' weights (RAGDoll 4.2)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Self


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
        """Space `device` and `host` layers evenly: the stream has time while resident ones are computed."""
        return cls((Place.DISK,) * layers).with_counts(device, host)

    def with_counts(self, device: int, host: int) -> Self:
        """Return the residency with these numbers that reads the fewest layers, at even distances."""
        if device < 0 or host < 0 or device + host > len(self):
            raise ValueError(f"{device} layers on the device and {host} in the host exceed {len(self)} layers")
        places = list(self.places)

        def at(place: Place) -> list[int]:
            return [layer for layer, now in enumerate(places) if now is place]

        def put(layers: list[int], count: int, place: Place) -> None:
            for layer in _evenly(layers, count):
                places[layer] = place

        left = max(0, len(at(Place.DEVICE)) - device)
        # What leaves the device is copied to the host, and not read, as long as there is room.
        to_host = min(left, max(0, host - len(at(Place.HOST))))
        leaving = _evenly(at(Place.DEVICE), left)
        for number, layer in enumerate(leaving):
            places[layer] = Place.HOST if number < to_host else Place.DISK
        missing = max(0, device - len(at(Place.DEVICE)))
        from_host = min(missing, max(0, len(at(Place.HOST)) - host))
        put(at(Place.HOST), from_host, Place.DEVICE)
        put(at(Place.DISK), missing - from_host, Place.DEVICE)
        put(at(Place.HOST), max(0, len(at(Place.HOST)) - host), Place.DISK)
        put(at(Place.DISK), max(0, host - len(at(Place.HOST))), Place.HOST)
        return type(self)(tuple(places))

    @classmethod
    def of_host(cls, layers: int, in_host: Collection[int]) -> Self:
        """Put these layers in host memory, the others on the device."""
        return cls(tuple(Place.HOST if layer in in_host else Place.DEVICE for layer in range(layers)))

    @property
    def in_host(self) -> tuple[int, ...]:
        return tuple(layer for layer, place in enumerate(self.places) if place is Place.HOST)

    def __getitem__(self, layer: int) -> Place:
        return self.places[layer]

    def __len__(self) -> int:
        return len(self.places)

    def count(self, place: Place) -> int:
        return self.places.count(place)


def _evenly(layers: list[int], count: int) -> list[int]:
    return [layers[(2 * number + 1) * len(layers) // (2 * count)] for number in range(count)]
