"""Decoder layers streamed to the device (RAGDoll 4.2, 4.3, 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ragorder.kernels.offload.checkpoint import LayerReadError
from ragorder.kernels.offload.feeder import Feeder, LayerBuffer, allocate
from ragorder.kernels.offload.moves import LayerMove
from ragorder.kernels.offload.residency import LayerTiers
from ragorder.kernels.offload.ring import LayerRing, Slot
from ragorder.kernels.offload.store import LayerStore
from ragorder.trie.residency.base import TierLevel

# Small steps in a row before slots are added: a prefill between decoding steps does not reallocate them.
_CALM_STEPS = 4
# From the scarcest memory to the most plentiful.
_ORDER = (TierLevel.DEVICE, TierLevel.HOST, TierLevel.DISK)


@dataclass(frozen=True, slots=True)
class StreamStats:
    """Streamed layers that were ready (`hits`) or waited for; `bytes` read from the checkpoint; layers that could not
    be read for a move (`unmoved`), are still to move (`moving`), or have requests' KV in the host
    (`kv_host_layers`)."""

    hits: int
    waits: int
    waits_s: float
    bytes: int
    slots: int
    device_layers: int
    host_layers: int
    disk_layers: int
    moved: int = 0
    unmoved: int = 0
    moving: int = 0
    kv_host_layers: int = 0


class LayerStreamer:
    """Supplies a model's decoder layers with weights from a store, one forward at a time. One thread makes all calls,
    except `LayerMove.read`. Layers off the device use slots of a ring: n slots read n - 1 layers ahead, even into the
    next step. `room` maps a step's tokens to bytes for slots; those of `resize` are the minimum. On a CPU a layer in
    host memory is computed `in_place`. Raises MemoryError without a slot."""

    def __init__(self, layers: Sequence[Any], store: LayerStore, device: torch.device) -> None:
        if len(layers) != len(store):
            raise ValueError(f"the store has {len(store)} layers, but the model has {len(layers)}")
        self.room: Callable[[int], int] | None = None
        self.store = store
        self.device = device
        self.residency = LayerTiers((TierLevel.DISK,) * len(store))
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
        # Where layers move to, those that have not begun, and the one that is read.
        self._target: LayerTiers | None = None
        self._pending: deque[int] = deque()
        self._move: LayerMove | None = None
        self._moved = self._unmoved = 0
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
        """Slots of each step, unless memory is short or a CPU computes all layers in place."""
        return self._wanted

    @property
    def stats(self) -> StreamStats:
        ring, count = self._ring, self.residency.count
        places = (count(TierLevel.DEVICE), count(TierLevel.HOST), count(TierLevel.DISK))
        moves = (self._moved, self._unmoved, len(self._pending) + (self._move is not None))
        return StreamStats(ring.hits, ring.waits, ring.waits_s, self._feeder.bytes, len(ring), *places, *moves)

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Run a forward of `tokens` tokens. It may end anywhere."""
        self._adapt(tokens)
        try:
            yield
        finally:
            self._end()

    def resize(self, slots: int) -> int:
        """Set the minimum slots per step, 1 or more. Return the number that fits into memory."""
        if slots < 1:
            raise ValueError(f"slots is {slots}: give 1 or more")
        self._end()
        self._wanted = slots
        self._keep_slots(slots)
        return self._least

    def move(self, residency: LayerTiers) -> LayerTiers:
        """Move layers now. Return the reached residency: layers that do not fit stay or go to disk. Raises
        LayerReadError; an unreadable layer stays."""
        self.begin_move(residency)
        while (move := self.next_move(residency)) is not None:
            move.read()
        return self.residency

    def begin_move(self, residency: LayerTiers) -> None:
        """Begin to move layers between two steps: evict now, and leave others to `next_move`. A running move ends where
        it is."""
        if len(residency) != len(self.store):
            raise ValueError(f"the residency has {len(residency)} layers, but the model has {len(self.store)}")
        self.end_move()
        self._end()
        self._target = residency
        if self._ends_whole:
            # Memory of a small step's workspace is no layer's.
            self._set_slots(min(self._least, len(self._ring)))
        moves = [layer for layer, place in enumerate(self.residency.places) if residency[layer] is not place]
        for layer in sorted(moves, key=lambda layer: _ORDER.index(residency[layer]), reverse=True):
            if residency[layer] is TierLevel.DISK:
                self._forget(layer)
                self._settle(layer, TierLevel.DISK)
            elif self.in_place and self.residency[layer] is not TierLevel.DISK:
                # Host memory is the device's memory.
                self._settle(layer, residency[layer])
            else:
                self._pending.append(layer)
        self._make_ring()

    def next_move(self, residency: LayerTiers) -> LayerMove | None:
        """Take the layer read last, between two steps, and return the next, which is streamed until taken; None once
        all have moved, or another move has begun. Raises LayerReadError, which ends the move."""
        if self._target is not residency:
            return None
        self._end()
        try:
            if self._move is not None:
                if not self._move.done:
                    return self._move
                move, self._move = self._move, None
                self._take(move)
                self._make_ring()
            while self._pending and self._move is None:
                self._begin_layer(self._pending.popleft())
        except LayerReadError:
            self._unmoved += 1
            self.end_move()
            raise
        finally:
            self._make_ring()
        if self._move is None:
            self._target = None
        return self._move

    def moves_to(self, residency: LayerTiers) -> bool:
        return self._target is residency

    def end_move(self) -> None:
        """Leave the other layers where they are. Waits for a running read."""
        move, self._move, self._target = self._move, None, None
        self._pending.clear()
        if move is not None:
            move.drop()

    def shed(self) -> bool:
        """End a move, and give back extra slots, else a quarter of the layers, else half of the slots. Return False at
        one slot."""
        self.end_move()
        self._end()
        self._short = True
        before = len(self._ring)
        self._set_slots(min(self._least, before))
        if len(self._ring) < before:
            return True
        kept = [layer for layer, place in enumerate(self.residency.places) if place is not TierLevel.DISK]
        if kept:
            places = list(self.residency.places)
            for layer in kept[:: -(-len(kept) // max(1, len(kept) // 4))]:
                places[layer] = TierLevel.DISK
            self.move(LayerTiers(tuple(places)))
            return True
        if len(self._ring) <= 1:
            return False
        self._keep_slots(max(1, len(self._ring) // 2))
        return True

    def regain(self, residency: LayerTiers) -> None:
        """Take back slots, else a quarter of the layers that `residency` has off the disk; nothing during a move."""
        if self._target is not None:
            return
        if self.streamed and self._least < self._wanted:
            self._end()
            self._keep_slots(self._wanted)
            return
        now = list(self.residency.places)
        missing = [
            layer for layer, place in enumerate(now) if place is TierLevel.DISK and residency[layer] is not place
        ]
        for layer in missing[: -(-len(missing) // 4)]:
            now[layer] = residency[layer]
        if missing:
            self.move(LayerTiers(tuple(now)))
        else:
            self._short = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.end_move()
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
        if self.room is None or self._short or self._ends_whole:
            # The last layers of such a move are in the memory of the ring.
            return
        streamed = len(self.streamed)
        wanted = max(min(self._least, streamed), min(streamed, self.room(tokens) // self.store.slot_bytes))
        self._calm = self._calm + 1 if wanted > len(self._ring) else 0
        if wanted < len(self._ring) or self._calm >= _CALM_STEPS:
            self._calm = 0
            self._set_slots(wanted)

    def _keep_slots(self, slots: int) -> None:
        wanted = min(slots, len(self.streamed))
        self._set_slots(wanted)
        self._least = slots if len(self._ring) == wanted else len(self._ring)

    def _set_slots(self, slots: int) -> None:
        self._ring.shrink(slots)
        with suppress(MemoryError):
            while len(self._ring) < slots:
                self._ring.grow(self._buffer())

    def _begin_layer(self, layer: int) -> None:
        assert self._target is not None
        target = self._target[layer]
        try:
            if target is TierLevel.HOST and not self.in_place:
                self._move = LayerMove(layer, target, partial(self._copy_to_host, layer, self._resident.get(layer)))
            elif self._leave_ring():
                slot = self._ring.take(layer)
                if slot.fence is not None:
                    slot.fence.synchronize()
                # The last one is in the ring's last buffer, and a step would wait for it as long.
                self._set_slots(0)
                self._hold(layer, slot.buffer)
                self._settle(layer, target)
            else:
                buffer = LayerBuffer(self.store.nbytes(layer), self.device)
                if buffer.fence is not None:
                    buffer.fence.synchronize()
                self._move = LayerMove(layer, target, partial(self._copy_to_device, layer, buffer))
        except MemoryError:
            self._stay(layer)

    def _leave_ring(self) -> bool:
        """Give a slot's memory to the next layer if all will be resident."""
        streamed = len(self.streamed)
        if not self._ends_whole or len(self._ring) < streamed:
            return False
        if streamed > 1:
            self._set_slots(streamed - 1)
        return streamed == 1

    @property
    def _ends_whole(self) -> bool:
        """Whether no layer will be streamed after the move."""
        off = (TierLevel.DISK,) if self.in_place else (TierLevel.DISK, TierLevel.HOST)
        return self._target is not None and not any(map(self._target.count, off))

    def _take(self, move: LayerMove) -> None:
        if isinstance(move.error, MemoryError):
            self._stay(move.layer)
            return
        if move.error is not None:
            raise move.error
        if isinstance(move.fetched, LayerBuffer):
            self._host.pop(move.layer, None)
            self._hold(move.layer, move.fetched)
        else:
            self._forget(move.layer)
            self._host[move.layer] = move.fetched
        self._settle(move.layer, move.target)

    def _stay(self, layer: int) -> None:
        if self.residency[layer] is TierLevel.DEVICE:
            # Its memory is promised to others.
            self._forget(layer)
            self._settle(layer, TierLevel.DISK)

    def _settle(self, layer: int, place: TierLevel) -> None:
        places = list(self.residency.places)
        places[layer] = place
        self.residency = LayerTiers(tuple(places))
        self._moved += 1

    def _make_ring(self) -> None:
        wanted = min(self._least, len(self.streamed))
        if not wanted or (len(self._ring) < wanted and not self._ends_whole):
            self._set_slots(wanted)
        while self._resident and self.streamed and not len(self._ring):
            # Evict one layer for the buffer that the others need.
            layer = max(self._resident)
            self._forget(layer)
            self._settle(layer, TierLevel.DISK)
            self._set_slots(1)
        self._ring.order(self.streamed)

    def _copy_to_device(self, layer: int, buffer: LayerBuffer, stale: Callable[[], bool]) -> LayerBuffer:
        self._feeder.fetch(layer, buffer.bytes, self._host.get(layer), stale)
        return buffer

    def _copy_to_host(self, layer: int, resident: LayerBuffer | None, stale: Callable[[], bool]) -> torch.Tensor:
        size = self.store.nbytes(layer)
        copy = allocate(size, torch.device("cpu"), pinned=self._gpu)
        if resident is None:
            self._feeder.fetch(layer, copy, None, stale)
        else:
            copy.copy_(resident.bytes[:size])
        return copy

    def _hold(self, layer: int, buffer: LayerBuffer) -> None:
        self._resident[layer] = buffer
        self._bind(layer, buffer.parameters(self.store.layouts[layer]))

    def _forget(self, layer: int) -> None:
        self._bind(layer, self._placeholders[layer])
        self._resident.pop(layer, None)
        self._host.pop(layer, None)


class _Hook:
    # It does not change results, so a model's identity ignores it.
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
