"""Layout of a decoder layer's parameters in one buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ragorder.kernels.models.support import UnsupportedModelError
from ragorder.kernels.offload.checkpoint import Checkpoint, CheckpointError, TensorEntry

# As in torch's allocators, so that streamed weights give the same products.
_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class Piece:
    entry: TensorEntry
    begin: int


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * int(self.dtype.itemsize)

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    parameters: tuple[Parameter, ...]
    nbytes: int

    @classmethod
    def of(cls, layer: Any, sources: Mapping[str, Sequence[Piece]]) -> LayerLayout:
        found, offset = [], 0
        for name, tensor in layer.named_parameters():
            made = Parameter(name, tensor.dtype, tuple(tensor.shape), offset, tuple(sources[name]))
            found.append(made)
            offset += -(-made.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(found), offset)

    @property
    def signature(self) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
        """Equal for layers whose parameters can be views of one buffer."""
        return tuple((each.name, each.dtype, each.shape) for each in self.parameters)


class CheckpointMap:
    """A checkpoint's tensors, renamed and merged as in transformers. `layers` has pieces by parameter per decoder
    layer, `rest` the names of other tensors. Raises CheckpointError, and UnsupportedModelError if a layer's weights are
    shared or converted."""

    def __init__(self, model: Any, prefix: str, layers: Any, checkpoint: Checkpoint) -> None:
        self._name = type(model).__name__
        _check_unshared(model, prefix, self._name)
        collected = _collect(model, checkpoint)
        self.layers: list[dict[str, list[Piece]]] = []
        missing: list[str] = []
        own: set[str] = set()
        for number, layer in enumerate(layers):
            pieces: dict[str, list[Piece]] = {}
            for name, tensor in layer.named_parameters():
                whole = f"{prefix}.{number}.{name}"
                if whole not in collected:
                    missing.append(whole)
                    continue
                found = collected[whole]
                own.update(entry.name for entry in found.entries)
                pieces[name] = found.pieces(whole, tuple(tensor.shape), self._name)
            self.layers.append(pieces)
        if missing:
            shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
            raise CheckpointError(f"{checkpoint.folder} lacks {len(missing)} of its weights: {shown}")
        used = {entry.name for found in collected.values() for entry in found.entries}
        self.rest = sorted(used - own)


class _Sources:
    def __init__(self, converter: Any | None) -> None:
        self.converter = converter
        self.by_pattern: dict[str, list[TensorEntry]] = defaultdict(list)

    @property
    def entries(self) -> list[TensorEntry]:
        return [entry for entries in self.by_pattern.values() for entry in entries]

    def pieces(self, target: str, shape: tuple[int, ...], model: str) -> list[Piece]:
        placed = self._placed(shape)
        if placed is None:
            kinds = ", ".join(type(each).__name__ for each in getattr(self.converter, "operations", ()))
            raise UnsupportedModelError(
                f"{model} cannot be streamed: {target} is converted when it is loaded ({kinds or 'several tensors'}); "
                "leave device_bytes out"
            )
        if not _fit([piece.entry.shape for piece in placed], shape):
            shapes = ", ".join(sorted({str(piece.entry.shape) for piece in placed}))
            raise CheckpointError(f"{target} is {shape} in the configuration, but {shapes} in the checkpoint")
        return placed

    def _placed(self, shape: tuple[int, ...]) -> list[Piece] | None:
        if self.converter is None:
            return [Piece(self.entries[0], 0)] if len(self.entries) == 1 else None
        operations = list(self.converter.operations)
        if [type(each).__name__ for each in operations] == ["Transpose"]:
            # A checkpoint may already have the transposed order.
            straight = operations[0].check_dims and [entry.shape for entry in self.entries] == [shape]
            return [Piece(self.entries[0], 0)] if straight else None
        groups = [self.by_pattern[pattern] for pattern in self.converter.source_patterns if pattern in self.by_pattern]
        kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in operations]
        if kinds in ([("MergeModulelist", 0)], [("Concatenate", 0)]):
            return _in_a_row(entry for group in groups for entry in group)
        if kinds == [("MergeModulelist", 0), ("Concatenate", 1)] and len({len(group) for group in groups}) == 1:
            # Expert by expert, with each expert's matrices in order.
            return _in_a_row(entry for expert in zip(*groups, strict=True) for entry in expert)
        return None


def _fit(parts: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> bool:
    if len(parts) == 1 and len(parts[0]) == len(shape):
        return parts[0] == shape
    rows = all(part[1:] == shape[len(shape) - len(part) + 1 :] for part in parts)
    return rows and sum(map(prod, parts)) == prod(shape)


def _in_a_row(entries: Iterable[TensorEntry]) -> list[Piece]:
    placed, begin = [], 0
    for entry in entries:
        placed.append(Piece(entry, begin))
        begin += prod(entry.shape)
    return placed


def _collect(model: Any, checkpoint: Checkpoint) -> dict[str, _Sources]:
    # Some versions that can serve whole models lack these.
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    expected, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, _Sources] = {}
    # In transformers' order, in which experts are merged.
    for name in sorted(checkpoint.entries, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
        if target not in expected and name in expected:
            target, pattern = rename_source_key(name, [], [], prefix, expected)
        if target not in expected:
            # Belongs to parts that this model lacks, such as a second head.
            continue
        sources = found.setdefault(target, _Sources(None if pattern is None else by_pattern[pattern]))
        sources.by_pattern[pattern or name].append(checkpoint.entries[name])
    return found


def _check_unshared(model: Any, prefix: str, name: str) -> None:
    seen: dict[int, str] = {}
    for each, parameter in model.named_parameters(remove_duplicate=False):
        before = seen.setdefault(id(parameter), each)
        if before != each and (each.startswith(f"{prefix}.") or before.startswith(f"{prefix}.")):
            raise UnsupportedModelError(
                f"{name} cannot be streamed: {before} and {each} are the same weights; leave device_bytes out"
            )
