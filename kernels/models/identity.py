"""Digest of everything that determines a model's KV."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor
from enum import Enum
from functools import partial
from hashlib import sha256
from types import FunctionType, MappingProxyType, MethodType
from typing import Any

import torch
import transformers

from ragorder.kernels.offload.store import StoredParameter
from ragorder.kernels.paging import KVShape
from ragorder.kernels.store.hashing import digest_in_pieces, digest_threads

# Increase when the engine's computation changes the contents of a KV block.
_FORMAT = 2
_SCALARS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
ORIGIN = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Entries of a configuration without effect on the computation."""

# Attributes of a module that are digested separately, or have no effect.
_DIGESTED_ELSEWHERE = frozenset({"_parameters", "_buffers", "_modules", "config", "generation_config", "training"})
_WITHOUT_EFFECT = frozenset({"name_or_path", "warnings_issued", "_is_hf_initialized"})


def identity(model: Any, shape: KVShape, stored: Mapping[str, StoredParameter] = MappingProxyType({})) -> str:
    """Return the digest, in a second per GB and thread. `stored` are parameters outside memory. Raises ValueError for
    unreadable weights."""
    with digest_threads() as threads:
        serializer = _Serializer(threads)
        contents = {
            "format": _FORMAT,
            "versions": [torch.__version__, transformers.__version__],
            "device": device_name(torch.device(model.device)),
            "precision": torch.get_float32_matmul_precision(),
            "kv": [shape.layers, shape.kv_heads, shape.head_dim, shape.block_size, shape.dtype],
            "config": model.config,
            # A shared module or tensor counts under each of its names.
            "modules": {name: _attributes(module) for name, module in model.named_modules(remove_duplicate=False)},
            "parameters": dict(model.named_parameters(remove_duplicate=False)) | dict(stored),
            "buffers": dict(model.named_buffers(remove_duplicate=False)),
        }
        digest = sha256()
        for part in serializer.parts(contents):
            digest.update(f"{len(part)} {part}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


class _Serializer:
    """Injective and equal in every process."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads
        # With the tensor itself, so that its id stays its own.
        self._digests: dict[int, tuple[torch.Tensor, str]] = {}
        self._objects: dict[int, tuple[object, int]] = {}
        self._above: set[int] = set()

    def parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, _SCALARS):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, StoredParameter):
            # The same parts as in memory.
            yield f"{torch.nn.Parameter.__module__}.{torch.nn.Parameter.__qualname__}"
            yield f"{tuple(value.shape)} {value.dtype}"
            yield from self.parts({})
            yield self._digest(value.read())
        elif id(value) in self._above:
            yield "something that this is a part of"
        else:
            self._above.add(id(value))
            yield f"{type(value).__module__}.{type(value).__qualname__}"
            yield from self._parts(value)
            self._above.discard(id(value))

    def _parts(self, value: Any) -> Iterator[str]:
        if isinstance(value, torch.Tensor):
            yield from self._tensor(value)
        elif isinstance(value, torch.nn.Module):
            # Already among the named modules.
            return
        elif isinstance(value, Mapping):
            yield str(len(value))
            for key, entry in sorted(value.items(), key=lambda item: repr(item[0])):
                yield repr(key)
                yield from self.parts(entry)
        elif isinstance(value, Set):
            yield str(len(value))
            yield from sorted(map(repr, value))
        elif isinstance(value, Sequence):
            yield str(len(value))
            for entry in value:
                yield from self.parts(entry)
        elif isinstance(value, type):
            yield f"{value.__module__}.{value.__qualname__}"
        elif isinstance(value, Enum):
            yield value.name
        elif id(value) in self._objects:
            yield f"object {self._objects[id(value)][1]}"
        else:
            self._objects[id(value)] = value, len(self._objects)
            yield from self.parts(_made_of(value))

    def _tensor(self, tensor: torch.Tensor) -> Iterator[str]:
        yield f"{tuple(tensor.shape)} {tensor.dtype}"
        # Quantised weights keep their scales in attributes.
        yield from self.parts({name: entry for name, entry in vars(tensor).items() if name not in _WITHOUT_EFFECT})
        if hasattr(tensor, "__tensor_flatten__"):
            names, context = tensor.__tensor_flatten__()
            yield from self.parts([context, {name: getattr(tensor, name) for name in names}])
            return
        if id(tensor) not in self._digests:
            self._digests[id(tensor)] = tensor, self._digest(tensor)
        yield self._digests[id(tensor)][1]

    def _digest(self, tensor: torch.Tensor) -> str:
        try:
            numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            return digest_in_pieces(lambda start, end: numbers[start:end].cpu().numpy(), len(numbers), self._threads)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"a disk tier needs the model's identity, and weights on {tensor.device} ({tensor.layout}) cannot "
                "be read: load the whole model into memory, or leave out disk_path"
            ) from error


def _made_of(value: Any) -> Any:
    if isinstance(value, transformers.PretrainedConfig):
        return {name: entry for name, entry in value.to_dict().items() if name not in ORIGIN}
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, FunctionType):
        return [value.__module__, value.__qualname__, value.__defaults__, value.__kwdefaults__, _bound(value)]
    return getattr(value, "__dict__", None)


def _bound(function: FunctionType) -> list[Any]:
    try:
        return [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        return []


def _attributes(module: torch.nn.Module) -> list[Any]:
    kept = {}
    for name, entry in vars(module).items():
        if name.endswith("_hooks"):
            # Hooks' keys count all hooks of the process.
            kept[name] = [hook for hook in entry.values() if not getattr(hook, "without_effect", False)]
        elif "_hooks_" not in name and name not in _DIGESTED_ELSEWHERE | _WITHOUT_EFFECT:
            kept[name] = entry
    return [type(module), kept]


def device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type
