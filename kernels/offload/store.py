"""Decoder layers of a checkpoint, read into buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from ragorder.kernels.offload.checkpoint import Checkpoint, LayerReadError, TensorEntry
from ragorder.kernels.offload.layout import CheckpointMap, LayerLayout, Parameter, Piece

# Size of a read: the unit of work for threads.
_CHUNK = 8 << 20


class Source(Protocol):
    def read(self, entry: TensorEntry, start: int, into: memoryview) -> None:
        """Read from byte `start` of the tensor. Any thread may call this. Raises LayerReadError."""


class LayerStore:
    """A model's layers, each in a buffer of `nbytes(layer)`. `source` replaces the checkpoint as reader."""

    def __init__(self, checkpoint: Checkpoint, layouts: Sequence[LayerLayout], source: Source | None = None) -> None:
        self.checkpoint = checkpoint
        self.layouts = tuple(layouts)
        self._source = source or checkpoint

    @classmethod
    def of(cls, checkpoint: Checkpoint, found: CheckpointMap, layers: Any, source: Source | None = None) -> LayerStore:
        layouts = [LayerLayout.of(layer, found.layers[place]) for place, layer in enumerate(layers)]
        return cls(checkpoint, layouts, source)

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def slot_bytes(self) -> int:
        return max(layout.nbytes for layout in self.layouts)

    def nbytes(self, layer: int) -> int:
        return self.layouts[layer].nbytes

    def stored_bytes(self, layer: int) -> int:
        pieces = (piece for parameter in self.layouts[layer].parameters for piece in parameter.pieces)
        return sum(piece.entry.length for piece in pieces)

    def chunks(self, layer: int) -> list[_Chunk]:
        """Return a layer's reads in the order of its buffer; threads may share them."""
        return [
            _Chunk(layer, parameter, piece, start, min(_CHUNK, piece.entry.length - start))
            for parameter in self.layouts[layer].parameters
            for piece in parameter.pieces
            for start in range(0, piece.entry.length, _CHUNK)
        ]

    def read(self, chunk: _Chunk, buffer: torch.Tensor) -> int:
        """Fill a part of a layer's host buffer. Return the bytes read. Raises LayerReadError."""
        entry, parameter = chunk.piece.entry, chunk.parameter
        try:
            if entry.dtype == parameter.dtype:
                begin = parameter.offset + chunk.piece.begin * int(entry.dtype.itemsize) + chunk.start
                target = memoryview(buffer.numpy())[begin : begin + chunk.length]
                self._source.read(entry, chunk.start, target)
            else:
                self._read_converted(chunk, buffer)
        except LayerReadError as error:
            raise LayerReadError(f"layer {chunk.layer} cannot be read: {error}") from error
        return chunk.length

    def parameters(self, prefix: str) -> Iterator[tuple[str, StoredParameter]]:
        for layer, layout in enumerate(self.layouts):
            for parameter in layout.parameters:
                yield f"{prefix}.{layer}.{parameter.name}", StoredParameter(self, layer, parameter)

    def close(self) -> None:
        self.checkpoint.close()

    def _read_converted(self, chunk: _Chunk, buffer: torch.Tensor) -> None:
        entry, parameter = chunk.piece.entry, chunk.parameter
        stored = torch.empty(chunk.length, dtype=torch.uint8)
        self._source.read(entry, chunk.start, memoryview(stored.numpy()))
        numbers = stored.view(entry.dtype)
        begin = chunk.piece.begin + chunk.start // int(entry.dtype.itemsize)
        parameter.view(buffer).view(-1)[begin : begin + len(numbers)].copy_(numbers)


@dataclass(frozen=True, slots=True)
class _Chunk:
    layer: int
    parameter: Parameter
    piece: Piece
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredParameter:
    store: LayerStore
    layer: int
    parameter: Parameter

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    def read(self) -> torch.Tensor:
        parameter = self.parameter
        alone = Parameter(parameter.name, parameter.dtype, parameter.shape, 0, parameter.pieces)
        buffer = torch.empty(prod(parameter.shape) * int(parameter.dtype.itemsize), dtype=torch.uint8)
        for chunk in self.store.chunks(self.layer):
            if chunk.parameter is parameter:
                self.store.read(_Chunk(chunk.layer, alone, chunk.piece, chunk.start, chunk.length), buffer)
        return alone.view(buffer)
