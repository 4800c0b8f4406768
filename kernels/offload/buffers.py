"""Buffers for layers in device or host memory."""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import torch

from ragorder.kernels.offload.layout import LayerLayout

__all__ = ["LayerBuffer", "allocate"]


def allocate(nbytes: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Return uint8 (nbytes,). Raises MemoryError."""
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
