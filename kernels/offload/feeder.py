"""Buffers for layers, and their feeder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import cycle
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch

from ragorder.kernels.offload.layout import LayerLayout
from ragorder.kernels.offload.store import LayerStore
from ragorder.pipelining.placement.fit import STAGES

_READERS = 2


def allocate(nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    try:
        # Threads outside inference mode fill it.
        with torch.inference_mode(False):
            if device.type == "cpu" and not pinned:
                # Not from the heap, which keeps freed memory.
                pages = mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS)
                return torch.frombuffer(pages, dtype=torch.uint8)
            return torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
    except (OSError, RuntimeError) as error:
        raise MemoryError(f"{device} has no room for a layer of {nbytes} bytes") from error


class LayerBuffer:
    """A buffer, and its views as parameters per layout. Other streams write after `fence`."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.bytes = allocate(nbytes, device)
        self.fence: Any = None
        if device.type == "cuda":
            # Activations of a running step may still use this memory.
            self.fence = torch.cuda.Event()
            self.fence.record(torch.cuda.current_stream(device))
        self._views: dict[object, dict[str, torch.nn.Parameter]] = {}

    def parameters(self, layout: LayerLayout) -> dict[str, torch.nn.Parameter]:
        found = self._views.get(layout.signature)
        if found is None:
            with torch.inference_mode(False):
                found = {
                    each.name: torch.nn.Parameter(each.view(self.bytes), requires_grad=False)
                    for each in layout.parameters
                }
            self._views[layout.signature] = found
        return found


class Feeder:
    """Threads that read layers in chunks, and for a GPU a stream that copies them. One thread calls `fill`, and one at
    a time `fetch`, for a layer that moves."""

    def __init__(self, store: LayerStore, device: torch.device) -> None:
        self.bytes = 0
        self._store = store
        self._device = device
        self._readers: ThreadPoolExecutor | None = ThreadPoolExecutor(_READERS, "ragorder-layer-reader")
        self._gpu = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._gpu else None
        stages = [_Stage(store.slot_bytes) for _ in range(STAGES - 1)] if self._gpu else []
        self._stages = cycle(stages)
        self._moving = _Stage(store.slot_bytes) if self._gpu else None
        self._counting = threading.Lock()

    def read(self, layer: int, into: torch.Tensor, stale: Callable[[], bool] = lambda: False) -> None:
        def read(chunk: Any) -> int:
            return 0 if stale() else self._store.read(chunk, into)

        chunks = self._store.chunks(layer)
        if self._readers is not None:
            try:
                reads = [self._readers.submit(read, chunk) for chunk in chunks]
            except RuntimeError:
                # A thread could not be started; the others end, so that nothing else writes into the buffer.
                self._readers.shutdown()
                self._readers = None
            else:
                # Even after an error, nothing may write into the buffer later.
                wait(reads)
                self._count(sum(each.result() for each in reads))
                return
        self._count(sum(map(read, chunks)))

    def fill(
        self,
        layer: int,
        into: torch.Tensor,
        host: torch.Tensor | None,
        fence: Any = None,
        stale: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Bring a layer into `into` after `fence`, from its copy in `host` or else from disk. Return the fence after
        which to read it. Raises LayerReadError."""
        size = self._store.nbytes(layer)
        if not self._gpu:
            if host is None:
                self.read(layer, into, stale)
            else:
                into[:size].copy_(host[:size])
            return None
        stage = None
        if host is None:
            stage = next(self._stages)
            stage.wait()
            self.read(layer, stage.bytes, stale)
            host = stage.bytes
        with torch.cuda.stream(self._stream):
            if fence is not None:
                self._stream.wait_event(fence)
            into[:size].copy_(host[:size], non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        # Freed memory is only reused after the copy.
        into.record_stream(self._stream)
        if stage is not None:
            stage.copied = copied
        return copied

    def fetch(self, layer: int, into: torch.Tensor, host: torch.Tensor | None, stale: Callable[[], bool]) -> None:
        """Read as `fill`, into memory that nothing else uses, in this thread: reads of steps do not wait for it.
        Raises LayerReadError."""
        size = self._store.nbytes(layer)
        if host is None:
            host = into if self._moving is None or not into.is_cuda else self._moving.bytes
            for chunk in self._store.chunks(layer):
                if stale():
                    return
                self._count(self._store.read(chunk, host))
        if host is into:
            return
        if not self._gpu:
            into[:size].copy_(host[:size])
            return
        with torch.cuda.stream(self._stream):
            into[:size].copy_(host[:size], non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record(self._stream)
        copied.synchronize()

    def _count(self, read: int) -> None:
        with self._counting:
            self.bytes += read

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown()
        if self._gpu:
            self._stream.synchronize()


class _Stage:
    def __init__(self, nbytes: int) -> None:
        self.bytes = allocate(nbytes, torch.device("cpu"), pinned=True)
        self.copied: Any = None

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
