"""Ring of buffers for layers read ahead (RAGDoll 4.3)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ragorder.kernels.offload.feeder import LayerBuffer


class Slot:
    """A buffer with `layer` once `filled`, or the `error` of its read. Its next user waits for `fence`."""

    __slots__ = ("abandoned", "buffer", "error", "fence", "filled", "layer")

    def __init__(self, buffer: LayerBuffer) -> None:
        self.buffer = buffer
        self.layer = -1
        self.filled = self.abandoned = False
        self.error: Exception | None = None
        self.fence: Any = buffer.fence


class LayerRing:
    """Layers read ahead, one per slot, in order of use, step after step (Figure 2b). One thread makes all calls. Taking
    a layer out of turn drops those read ahead before it, or all if it is not among them. `fill(slot, stale)` reads
    `slot.layer` on the ring's thread, and may stop once `stale()`."""

    def __init__(self, fill: Callable[[Slot, Callable[[], bool]], None], buffers: Sequence[LayerBuffer]) -> None:
        self.hits = self.waits = 0
        self.waits_s = 0.0
        self._fill = fill
        # A slot is free, in the queue, or abandoned while it is being filled.
        self._free = [Slot(buffer) for buffer in buffers]
        self._slots = len(self._free)
        self._queue: deque[Slot] = deque()
        # Slots to be filled, in order; the first is being filled.
        self._jobs: deque[Slot] = deque()
        self._layers: tuple[int, ...] = ()
        # Place of the next layer to read, in the order, which repeats.
        self._place = 0
        # Slots to be removed once they are free.
        self._surplus = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="ragorder-layers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return self._slots

    @property
    def ahead(self) -> list[int]:
        with self._changed:
            return [slot.layer for slot in self._queue]

    def order(self, layers: Sequence[int]) -> None:
        """Stream these layers from the next step on. Of those read ahead, keep what begins the new order."""
        with self._changed:
            ahead, chosen = deque[Slot](), tuple(layers)
            for slot in self._queue:
                if len(ahead) < len(chosen) and slot.layer == chosen[len(ahead)]:
                    ahead.append(slot)
                else:
                    self._drop(slot)
            self._queue, self._layers, self._place = ahead, chosen, len(ahead)
            self._top_up()

    def take(self, layer: int) -> Slot:
        """Return the layer's slot, once filled. Raises the error of `fill`, ValueError for a layer not streamed, and
        MemoryError without a slot."""
        with self._changed:
            slot, waited = self._await(layer)
            if slot.error is not None and not waited:
                # It failed when read ahead: the fault may be over, so read it again.
                self._drop_all()
                slot, _ = self._await(layer)
            if slot.error is not None:
                error = slot.error
                self._drop_all()
                raise error
            return slot

    def give_back(self, slot: Slot) -> None:
        with self._changed:
            if self._queue and self._queue[0] is slot:
                self._release(self._queue.popleft())
                self._top_up()

    def grow(self, buffer: LayerBuffer) -> None:
        with self._changed:
            self._slots += 1
            self._free.append(Slot(buffer))
            self._top_up()

    def shrink(self, slots: int) -> None:
        """Remove slots until `slots` are left: free ones, then the last read ahead. Call it with no slot taken."""
        with self._changed:
            self._surplus = max(0, self._slots - slots)
            while self._surplus and self._free:
                self._free.pop()
                self._let_go()
            while self._surplus > sum(slot.abandoned for slot in self._jobs) and self._queue:
                self._place -= 1
                self._drop(self._queue.pop())
            while self._surplus:
                self._changed.wait()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._drop_all()
            self._changed.notify_all()
        self._thread.join()

    def _await(self, layer: int) -> tuple[Slot, bool]:
        slot = self._seek(layer)
        if slot.filled:
            self.hits += 1
            return slot, False
        before_s = time.perf_counter()
        while not slot.filled:
            self._changed.wait()
        self.waits += 1
        self.waits_s += time.perf_counter() - before_s
        return slot, True

    def _seek(self, layer: int) -> Slot:
        if layer not in self._layers:
            raise ValueError(f"layer {layer} is not streamed")
        if not self._slots:
            raise MemoryError("there is no buffer for streamed layers")
        if any(slot.layer == layer for slot in self._queue):
            while self._queue[0].layer != layer:
                self._drop(self._queue.popleft())
        else:
            self._drop_all()
            self._place = self._layers.index(layer)
        self._top_up()
        while not self._queue:
            # The only buffer is still being filled with a dropped layer.
            self._changed.wait()
            self._top_up()
        return self._queue[0]

    def _top_up(self) -> None:
        while self._free and len(self._queue) < len(self._layers) and not self._closed:
            slot = self._free.pop()
            slot.layer = self._layers[self._place % len(self._layers)]
            slot.filled = slot.abandoned = False
            slot.error = None
            self._place += 1
            self._queue.append(slot)
            self._jobs.append(slot)
            self._changed.notify_all()

    def _drop_all(self) -> None:
        while self._queue:
            self._drop(self._queue.popleft())

    def _drop(self, slot: Slot) -> None:
        if slot not in self._jobs:
            self._release(slot)
        elif slot is self._jobs[0]:
            # The thread may be filling it, and releases it then.
            slot.abandoned = True
        else:
            self._jobs.remove(slot)
            self._release(slot)

    def _release(self, slot: Slot) -> None:
        slot.layer = -1
        if self._surplus:
            self._let_go()
        else:
            self._free.append(slot)
        self._changed.notify_all()

    def _let_go(self) -> None:
        self._surplus -= 1
        self._slots -= 1

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._jobs:
                    if self._closed:
                        return
                    self._changed.wait()
                slot = self._jobs[0]
            try:
                if not slot.abandoned:
                    self._fill(slot, lambda slot=slot: slot.abandoned)  # type: ignore[misc]
            except Exception as error:
                slot.error = error
            with self._changed:
                self._jobs.popleft()
                slot.filled = True
                if slot.abandoned:
                    self._release(slot)
                self._changed.notify_all()
            # Do not keep a removed buffer alive.
            del slot
