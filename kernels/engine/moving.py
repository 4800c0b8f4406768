"""Moves of layers and KV pools while requests run (RAGDoll 5)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from threading import Lock

from ragorder.kernels.engine.budgeted import MemoryPressure
from ragorder.kernels.engine.fair_lock import FairLock
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.offload.checkpoint import LayerReadError
from ragorder.kernels.offload.residency import LayerTiers
from ragorder.kernels.paging import OutOfBlocksError
from ragorder.pipelining.placement.base import Placement


class Moves:
    """One move at a time, in its caller's thread, which takes the engine's lock between steps, and reads without it.
    `ready` raises if the engine cannot move now."""

    def __init__(
        self,
        lock: FairLock,
        memory: MemoryPressure,
        ready: Callable[[], None],
        unfinished: Callable[[], Collection[Sequence]],
    ) -> None:
        self._lock = lock
        self._memory = memory
        self._ready = ready
        self._unfinished = unfinished
        # Taken before the other lock.
        self._moving = Lock()

    def move(self, residency: LayerTiers) -> LayerTiers:
        with self._moving:
            with self._lock:
                self._ready()
                self._memory.begin_move(residency)
            self._carry(residency)
            with self._lock:
                return self._memory.residency

    def place(self, placement: Placement, now: Callable[[], Placement]) -> None:
        """`now` is the placement before."""
        with self._moving:
            with self._lock:
                before, was = self._memory.residency, now()
            weights = placement.weights
            if weights.total != len(before):
                raise ValueError(f"the placement has {weights.total} layers, but the model has {len(before)}")
            try:
                self._place(placement, before.with_counts(weights.device, weights.host))
            except LayerReadError:
                with suppress(LayerReadError, MemoryError, OutOfBlocksError):
                    self._place(was, before)
                raise
            except MemoryError:
                # Layers that went stay away; batches and steps are those of before.
                with self._lock, suppress(MemoryError, OutOfBlocksError):
                    self._memory.finish_place(was, self._unfinished())
                raise

    def _place(self, placement: Placement, residency: LayerTiers) -> None:
        with self._lock:
            self._ready()
            self._memory.begin_place(placement, residency, self._unfinished())
            kv, more = self._memory.kv_moves(placement.kv_host_layers)
        # What makes room on the device comes first, what takes it last.
        self._carry(residency, kv_before=kv if more else (), kv_after=() if more else kv)
        with self._lock:
            self._ready()
            self._memory.finish_place(placement, self._unfinished())

    def _carry(self, residency: LayerTiers, *, kv_before: Iterable[int] = (), kv_after: Iterable[int] = ()) -> None:
        try:
            self._carry_kv(kv_before)
            while True:
                with self._lock:
                    self._ready()
                    move = self._memory.next_move(residency)
                if move is None:
                    break
                move.read()
            self._carry_kv(kv_after)
        except BaseException:
            with self._lock:
                self._memory.end_move()
            raise

    def _carry_kv(self, layers: Iterable[int]) -> None:
        for layer in layers:
            with self._lock:
                self._ready()
                self._memory.move_kv(layer)
