"""Pool with some layers' KV in host memory (RAGDoll 4.2, Eq. 3)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ragorder.kernels.paging.pool import BlockPool, KVShape, Part, StepBlocks, runs, zeros
from ragorder.pipelining.placement.base import KV_BUFFERS


class LayeredPool(BlockPool):
    """A pool with separate memory for each layer, on `device` or in the host, but common blocks, tables and rows.

    On a CPU host memory is read `in_place`; set it only while no layer is in the host. On a GPU a step's blocks of a
    host layer are copied into a buffer ahead of its turn, and written ones back. A buffer has room for a whole layer.
    """

    def __init__(
        self, shape: KVShape, blocks: int, device: torch.device | str = "cpu", in_host: Sequence[int] = ()
    ) -> None:
        self.in_place = torch.device(device).type != "cuda"
        self.in_host = tuple(in_host)
        self._stream = None if self.in_place else torch.cuda.Stream(torch.device(device))
        # The step that the buffers are filled for; the layer in each, and what has filled it.
        self._step: StepBlocks | None = None
        self._filled: dict[int, tuple[int, Any]] = {}
        super().__init__(shape, blocks, device)

    @property
    def kv(self) -> torch.Tensor:
        """A copy of all KV."""
        return self.read(range(self.blocks))

    @property
    def block_rows(self) -> int:
        return 2 * self.shape.block_size

    @property
    def copied(self) -> bool:
        return bool(self.in_host) and not self.in_place

    @property
    def parts(self) -> list[Part]:
        size = self.shape.block_bytes // self.shape.layers
        return [
            Part(kv.view(torch.uint8).view(self.blocks, size), layer * size, self._device_of(layer in self.in_host))
            for layer, kv in enumerate(self._memory[: self.shape.layers])
        ]

    def read(self, blocks: Any) -> torch.Tensor:
        self.settle()
        found = torch.as_tensor(blocks, dtype=torch.int64)
        parts = [kv[found.to(kv.device)].to(self.device) for kv in self._memory[: self.shape.layers]]
        return torch.cat(parts, dim=1)

    def settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def move(self, layer: int, *, to_host: bool) -> None:
        """Move a layer's KV between two steps. Raises MemoryError, changing nothing."""
        if (layer in self.in_host) is to_host:
            return
        self.settle()
        in_host = tuple(sorted({*self.in_host, layer} if to_host else {*self.in_host} - {layer}))
        if not self.in_place:
            memory = list(self._memory)
            memory[layer] = self._zeros(layer in in_host)
            used = [block for block in range(self.blocks) if self.references(block)]
            for first, _, count in runs(used, used):
                memory[layer][first : first + count].copy_(self._memory[layer][first : first + count])
            layers, buffers = self.shape.layers, min(KV_BUFFERS, len(in_host))
            memory += [self._zeros(False) for _ in range(layers + buffers - len(memory))]
            self._memory = memory[: layers + buffers]
        self.in_host, self._views, self._step = in_host, None, None

    def supplied(self, layer: int, blocks: StepBlocks | None = None) -> Any:
        return self._supplied(layer, blocks) if self.copied else super().supplied(layer)

    @contextmanager
    def _supplied(self, layer: int, blocks: StepBlocks | None) -> Iterator[None]:
        step = blocks
        if step is None:
            step = StepBlocks([block for block in range(self.blocks) if self.references(block)], ())
        if step is not self._step:
            # An earlier step may have ended inside a layer.
            self._step, self._filled = step, {}
            self._follow()
            self._read_ahead([each for each in self.in_host if each >= layer][:KV_BUFFERS])
        if layer not in self.in_host:
            yield
            return
        turn = self.in_host.index(layer)
        if self._filled.get(turn % KV_BUFFERS, (None,))[0] != layer:
            self._read_ahead([layer])
        _, filled = self._filled[turn % KV_BUFFERS]
        if filled is not None:
            torch.cuda.current_stream(self.device).wait_event(filled)
        yield
        self._follow()
        self._copy(self._buffer(layer), self._memory[layer], step.written)
        self._read_ahead(self.in_host[turn + KV_BUFFERS :][:1])

    def _read_ahead(self, layers: Collection[int]) -> None:
        assert self._step is not None
        for layer in layers:
            self._copy(self._memory[layer], self._buffer(layer), self._step.read)
            filled = None if self._stream is None else self._stream.record_event()
            self._filled[self.in_host.index(layer) % KV_BUFFERS] = layer, filled

    def _follow(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def _copy(self, source: torch.Tensor, target: torch.Tensor, blocks: Sequence[int]) -> None:
        with torch.cuda.stream(self._stream):
            for first, _, count in runs(blocks, blocks):
                target[first : first + count].copy_(source[first : first + count], non_blocking=True)

    def _viewed(self) -> list[torch.Tensor]:
        parts = self._memory[: self.shape.layers]
        for layer in self.in_host if self.copied else ():
            parts[layer] = self._buffer(layer)
        return parts

    def _buffer(self, layer: int) -> torch.Tensor:
        return self._memory[self.shape.layers + self.in_host.index(layer) % KV_BUFFERS]

    def _make(self, blocks: int) -> list[torch.Tensor]:
        buffers = min(KV_BUFFERS, len(self.in_host)) if self.copied else 0
        in_host = [layer in self.in_host for layer in range(self.shape.layers)] + [False] * buffers
        return [self._zeros(each, blocks) for each in in_host]

    def _zeros(self, in_host: bool, blocks: int | None = None) -> torch.Tensor:
        on_gpu = self._stream is not None
        count = self.blocks if blocks is None else blocks
        return zeros(self.shape, count, 1, self._device_of(in_host), pinned=in_host and on_gpu)

    def _device_of(self, in_host: bool) -> torch.device:
        return torch.device("cpu") if in_host else self.device
