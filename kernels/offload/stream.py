"""Decoder layers with weights on the device only during computation, and their residency (RAGDoll 4.2, 4.3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import torch

from ragorder.kernels.offload.feeder import Feeder, LayerBuffer, allocate
from ragorder.kernels.offload.ring import LayerRing, Slot
from ragorder.kernels.offload.store import LayerStore


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


# Small steps in a row before slots are added: a prefill between decoding steps does not reallocate them.
_CALM_STEPS = 4
# From the scarcest memory to the most plentiful.
_ORDER = (Place.DEVICE, Place.HOST, Place.DISK)


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Streamed layers that were ready (`hits`) or waited for; `bytes` read from the checkpoint; layers by tier."""

    hits: int
    waits: int
    waits_s: float
    bytes: int
    slots: int
    device_layers: int
    host_layers: int
    disk_layers: int


class LayerStreamer:
    """Supplies the decoder layers of a model with weights from a store, one forward at a time. One thread makes all
    calls. Layers on the device keep their weights. The others use slots of a ring: n slots read n - 1 layers ahead,
    also those of the next step. `room` maps a step's tokens to bytes for slots; those of `resize` are the minimum. On a
    CPU a layer in host memory is computed `in_place`; on a GPU it is copied. Raises MemoryError without a slot."""

    def __init__(self, layers: Sequence[Any], store: LayerStore, device: torch.device) -> None:
        if len(layers) != len(store):
            raise ValueError(f"the store has {len(store)} layers, but the model has {len(layers)}")
        self.room: Callable[[int], int] | None = None
        self.store = store
        self.device = device
        self.residency = Residency((Place.DISK,) * len(store))
        self._gpu = device.type == "cuda"
        self.in_place = not self._gpu
        self._targets = [_targets(layer, store, place) for place, layer in enumerate(layers)]
        self._placeholders = [_placeholders(store, place, device) for place in range(len(store))]
        for layer, parameters in enumerate(self._placeholders):
            self._bind(layer, parameters)
        # Layers that keep their weights, and host copies of streamed ones.
        self._resident: dict[int, LayerBuffer] = {}
        self._host: dict[int, torch.Tensor] = {}
        self._feeder = Feeder(store, device)
        # Slots of every step: now, and once memory is available again.
        self._least = self._wanted = 0
        self._calm = 0
        # Memory was given back: the ring does not grow beyond `_least`.
        self._short = False
        self._taken: tuple[int, Slot] | None = None
        self._ring = LayerRing(self._fill, [self._buffer()])
        self._least = self._wanted = len(self._ring)
        self._hooks: list[Any] = []
        for layer, module in enumerate(layers):
            self._hooks += [
                module.register_forward_pre_hook(_Hook(self._before, layer)),
                module.register_forward_hook(_Hook(self._after, layer)),
            ]
        self._ring.order(self.streamed)

    @property
    def streamed(self) -> list[int]:
        return [layer for layer in range(len(self.store)) if layer not in self._resident]

    @property
    def held_bytes(self) -> int:
        return sum(map(self.store.nbytes, self._resident)) + len(self._ring) * self.store.slot_bytes

    @property
    def slots(self) -> int:
        return len(self._ring)

    @property
    def wanted_slots(self) -> int:
        """Slots that each step has, unless memory is short or a CPU computes all layers in place."""
        return self._wanted

    @property
    def stats(self) -> StreamStats:
        ring, count = self._ring, self.residency.count
        places = (count(Place.DEVICE), count(Place.HOST), count(Place.DISK))
        return StreamStats(ring.hits, ring.waits, ring.waits_s, self._feeder.bytes, len(ring), *places)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Run a forward of `tokens` tokens. It may end anywhere."""
        self._adapt(tokens)
        try:
            yield
        finally:
            self._end()

    def resize(self, slots: int) -> int:
        """Set the minimum of slots per step, 1 or more. Return the number that fits into memory."""
        if slots < 1:
            raise ValueError(f"slots is {slots}: give 1 or more")
        self._end()
        self._wanted = slots
        self._keep_slots(slots)
        return self._least

    def move(self, residency: Residency) -> Residency:
        """Move layers between two steps. Return the reached residency: layers that do not fit stay or go to the disk.
        Raises LayerReadError; an unreadable layer stays."""
        if len(residency) != len(self.store):
            raise ValueError(f"the residency has {len(residency)} layers, but the model has {len(self.store)}")
        self._end()
        self._ring.order(())
        if all(place is Place.DEVICE or (self.in_place and place is Place.HOST) for place in residency.places):
            # Free the ring's memory for the last layers.
            self._set_slots(0)
        reached = list(self.residency.places)
        try:
            # Evictions first.
            moves = [layer for layer in range(len(reached)) if residency[layer] is not reached[layer]]
            for layer in sorted(moves, key=lambda layer: _ORDER.index(residency[layer]), reverse=True):
                reached[layer] = self._move(layer, reached[layer], residency[layer])
        finally:
            if not self.streamed or not len(self._ring):
                self._set_slots(self._least if self.streamed else 0)
            while self._resident and self.streamed and not len(self._ring):
                # Evict one layer for the buffer that the others need.
                layer = max(self._resident)
                self._forget(layer)
                reached[layer] = Place.DISK
                self._set_slots(1)
            self.residency = Residency(tuple(reached))
            self._ring.order(self.streamed)
        return self.residency

    def shed(self) -> bool:
        """Give back extra slots, else a quarter of the layers, else half of the slots. Return False at one slot."""
        self._end()
        self._short = True
        before = len(self._ring)
        self._set_slots(min(self._least, before))
        if len(self._ring) < before:
            return True
        kept = [layer for layer, place in enumerate(self.residency.places) if place is not Place.DISK]
        if kept:
            places = list(self.residency.places)
            for layer in kept[:: -(-len(kept) // max(1, len(kept) // 4))]:
                places[layer] = Place.DISK
            self.move(Residency(tuple(places)))
            return True
        if len(self._ring) <= 1:
            return False
        self._keep_slots(max(1, len(self._ring) // 2))
        return True

    def regain(self, residency: Residency) -> None:
        """Take back slots, else a quarter of the layers that `residency` has off the disk."""
        if self.streamed and self._least < self._wanted:
            self._end()
            self._keep_slots(self._wanted)
            return
        now = list(self.residency.places)
        missing = [layer for layer, place in enumerate(now) if place is Place.DISK and residency[layer] is not place]
        for layer in missing[: -(-len(missing) // 4)]:
            now[layer] = residency[layer]
        if missing:
            self.move(Residency(tuple(now)))
        else:
            self._short = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._end()
        for layer in range(len(self.store)):
            self._forget(layer)
        self._ring.close()
        self._feeder.close()
        self.store.close()

    def _before(self, layer: int) -> None:
        # An earlier forward may have ended inside a layer.
        self._end()
        if layer in self._resident:
            return
        slot = self._ring.take(layer)
        self._taken = layer, slot
        if slot.fence is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.fence)
        self._bind(layer, slot.buffer.parameters(self.store.layouts[layer]))

    def _after(self, layer: int) -> None:
        if self._taken is not None and self._taken[0] == layer:
            self._end()

    def _end(self) -> None:
        if self._taken is None:
            return
        layer, slot = self._taken
        self._taken = None
        self._bind(layer, self._placeholders[layer])
        if self._gpu:
            slot.fence = torch.cuda.Event()
            slot.fence.record(torch.cuda.current_stream(self.device))
        self._ring.give_back(slot)

    def _fill(self, slot: Slot, stale: Callable[[], bool]) -> None:
        host = self._host.get(slot.layer)
        slot.fence = self._feeder.fill(slot.layer, slot.buffer.bytes, host, slot.fence, stale)

    def _bind(self, layer: int, parameters: dict[str, torch.nn.Parameter]) -> None:
        for name, (owner, attribute) in self._targets[layer].items():
            owner[attribute] = parameters[name]

    def _buffer(self) -> LayerBuffer:
        return LayerBuffer(self.store.slot_bytes, self.device)

    def _adapt(self, tokens: int) -> None:
        if not self.streamed:
            return
        if not len(self._ring):
            # There was no memory for a single slot.
            self._set_slots(1)
        if self.room is None or self._short:
            return
        wanted = max(self._least, min(len(self.streamed), self.room(tokens) // self.store.slot_bytes))
        self._calm = self._calm + 1 if wanted > len(self._ring) else 0
        if wanted < len(self._ring) or self._calm >= _CALM_STEPS:
            self._calm = 0
            self._set_slots(wanted)

    def _keep_slots(self, slots: int) -> None:
        self._set_slots(slots)
        self._least = len(self._ring)

    def _set_slots(self, slots: int) -> None:
        self._ring.shrink(slots)
        with suppress(MemoryError):
            while len(self._ring) < slots:
                self._ring.grow(self._buffer())

    def _move(self, layer: int, source: Place, target: Place) -> Place:
        try:
            if target is Place.DISK:
                self._forget(layer)
            elif self.in_place and source is not Place.DISK:
                # Host memory is the device's memory.
                pass
            elif target is Place.DEVICE or self.in_place:
                self._bring(layer)
            else:
                self._to_host(layer)
        except MemoryError:
            if source is Place.DEVICE:
                self._forget(layer)
                return Place.DISK
            return source
        return target

    def _bring(self, layer: int) -> None:
        buffer = LayerBuffer(self.store.nbytes(layer), self.device)
        fence = self._feeder.fill(layer, buffer.bytes, self._host.get(layer), buffer.fence)
        if fence is not None:
            fence.synchronize()
        self._host.pop(layer, None)
        self._resident[layer] = buffer
        self._bind(layer, buffer.parameters(self.store.layouts[layer]))

    def _to_host(self, layer: int) -> None:
        copy = allocate(self.store.nbytes(layer), torch.device("cpu"), pinned=self._gpu)
        resident = self._resident.get(layer)
        if resident is None:
            self._feeder.read(layer, copy)
        else:
            copy.copy_(resident.bytes)
        self._forget(layer)
        self._host[layer] = copy

    def _forget(self, layer: int) -> None:
        self._bind(layer, self._placeholders[layer])
        self._resident.pop(layer, None)
        self._host.pop(layer, None)


class _Hook:
    """Supplies weights without changing results, so a model's identity ignores it."""

    without_effect = True

    def __init__(self, call: Callable[[int], None], layer: int) -> None:
        self._call = call
        self._layer = layer

    def __call__(self, *_: Any) -> None:
        self._call(self._layer)


def _targets(layer: Any, store: LayerStore, number: int) -> dict[str, tuple[Any, str]]:
    found = {}
    for parameter in store.layouts[number].parameters:
        module, _, attribute = parameter.name.rpartition(".")
        found[parameter.name] = layer.get_submodule(module)._parameters, attribute
    return found


def _placeholders(store: LayerStore, layer: int, device: torch.device) -> dict[str, torch.nn.Parameter]:
    # They take no memory.
    found = {}
    for each in store.layouts[layer].parameters:
        number = torch.zeros((), dtype=each.dtype, device=device)
        found[each.name] = torch.nn.Parameter(number.expand(each.shape), requires_grad=False)
    return found
