"""Sizes of a model, from its folder or its configuration. Without torch."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from ragorder.pipelining.batching.sizes import Curve, ModelSizes

__all__ = ["model_sizes"]

_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_STORED |= {"F8_E4M3": 1, "F8_E5M2": 1}
_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
_STEPS = (64, 256, 1024, 4096, 8192)
# Requests whose logits one step computes.
_ROWS = 64
# A safetensors file begins with the length of its header, which the format limits.
_HEADER_BYTES = 8
_LARGEST_HEADER = 100_000_000
_ALIGNMENT = 512


def model_sizes(path: Path | str, *, dtype: str | None = None, block_tokens: int = 16) -> ModelSizes:
    """Of a folder with a config.json and safetensors, from their headers; or of a config.json, from its shapes.

    `dtype`: of weights and KV, instead of the stored one (float32, bfloat16, float16). The workspace is estimated: each
    token's hidden states twice, the widest of attention and MLP, and logits. Raises OSError, and ValueError for
    folders without configuration or weights, unreadable files, and configurations that are none of a decoder.
    """
    path = Path(path)
    if dtype is not None and dtype not in _ITEMSIZES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_ITEMSIZES)}")
    if not path.exists():
        raise ValueError(f"there is no {path}: give the folder of a model, or its config.json")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is no folder of a model: it has no config.json")
    shape = _Shape.read(file)
    itemsize = _ITEMSIZES[dtype] if dtype else shape.itemsize
    if path.is_dir():
        layers, outside, stored = _of_weights(path, shape)
        # Stored weights are converted when they are loaded.
        if dtype:
            layers, outside = [size * itemsize // stored for size in layers], outside * itemsize // stored
        else:
            itemsize = stored
    else:
        layers, outside = [shape.layer * itemsize] * shape.layers, shape.outside * itemsize
    return ModelSizes(
        layers=tuple(layers),
        outside=outside,
        kv_token=2 * shape.layers * shape.kv_heads * shape.head_dim * itemsize,
        step_bytes=shape.workspaces(itemsize),
        itemsize=itemsize,
        block_tokens=block_tokens,
    )


class _Shape:
    """Shape of a decoder, by its configuration. `layer`, `outside`: numbers of parameters."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        def read(*names: str, default: int | None = None) -> int:
            value = next((config[each] for each in names if config.get(each) is not None), default)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{name} has no {names[0]}, or one that is no number: it is no decoder's configuration"
                )
            return value

        self.layers = read("num_hidden_layers", "n_layer", "num_layers")
        self.hidden = read("hidden_size", "n_embd", "d_model")
        self.heads = read("num_attention_heads", "n_head")
        self.kv_heads = read("num_key_value_heads", "num_kv_heads", default=self.heads)
        self.head_dim = read("head_dim", default=max(1, self.hidden // self.heads))
        self.vocabulary = read("vocab_size")
        # GPT-2's way: two matrices with four times the hidden size between them, and learnt positions.
        plain = "n_embd" in config
        inner = read("intermediate_size", "n_inner", default=4 * self.hidden)
        experts = read("num_local_experts", "num_experts", "n_routed_experts", default=1)
        if experts > 1:
            inner = read("moe_intermediate_size", default=inner)
        self.inner = inner * (read("num_experts_per_tok", default=1) if experts > 1 else 1)
        tied = bool(config.get("tie_word_embeddings", plain))
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        mlp = experts * (2 if plain else 3) * self.hidden * inner + (experts * self.hidden if experts > 1 else 0)
        norms = (4 if plain else 2) * self.hidden
        qkv_bias = plain or config.get("attention_bias") or config.get("model_type") in ("qwen2", "qwen2_moe")
        biases = (self.heads + 2 * self.kv_heads) * self.head_dim if qkv_bias else 0
        if plain:
            biases += 2 * self.hidden + inner
        self.layer = attention + mlp + norms + biases
        positions = read("n_positions", default=1024) * self.hidden if plain else 0
        final_norm = (2 if plain else 1) * self.hidden
        self.outside = self.vocabulary * self.hidden * (1 if tied else 2) + positions + final_norm
        self.tied = tied
        self.itemsize = _ITEMSIZES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), 4)

    @classmethod
    def read(cls, file: Path) -> _Shape:
        try:
            config = json.loads(file.read_bytes())
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: give the config.json of a model") from error
        if not isinstance(config, dict):
            raise ValueError(f"{file} is no configuration of a model")
        # Of models with several parts, the one that generates.
        text = config.get("text_config")
        return cls({**config, **text} if isinstance(text, dict) else config, str(file))

    def workspaces(self, itemsize: int) -> Curve:
        """Of steps, by their tokens. Norms and logits are computed in float32."""
        attended = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        token = 2 * self.hidden * (itemsize + 4) + max(2 * attended, 3 * self.inner) * itemsize
        return tuple((step, step * token + min(step, _ROWS) * self.vocabulary * (itemsize + 4)) for step in _STEPS)


def _of_weights(folder: Path, shape: _Shape) -> tuple[list[int], int, int]:
    """Bytes of each layer in a buffer, bytes of all else, and of a number of most weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no weights (*.safetensors): give its config.json alone for an estimate")
    tensors: dict[str, tuple[int, int]] = {}
    for file in files:
        tensors |= _header(file)
    if shape.tied:
        # Stored twice by some, loaded once.
        tensors = {name: size for name, size in tensors.items() if not name.endswith("lm_head.weight")}
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    by_itemsize: dict[int, int] = defaultdict(int)
    for name, (size, itemsize) in tensors.items():
        by_itemsize[itemsize] += size
        if found := _LAYER.match(name):
            # In a buffer of its own each tensor begins at such a multiple.
            lists[found[1]][int(found[2])] += -(-size // _ALIGNMENT) * _ALIGNMENT
    decoders = [name for name, sizes in lists.items() if sorted(sizes) == list(range(shape.layers))]
    if not decoders:
        raise ValueError(
            f"{folder} lacks weights: no list of {shape.layers} layers is among its {len(tensors)} tensors"
        )
    prefix = max(decoders, key=lambda name: sum(lists[name].values()))
    outside = sum(size for name, (size, _) in tensors.items() if not name.startswith(f"{prefix}."))
    layers = [lists[prefix][number] for number in range(shape.layers)]
    return layers, outside, max(by_itemsize, key=by_itemsize.__getitem__)


def _header(file: Path) -> dict[str, tuple[int, int]]:
    """Bytes of each tensor, and of one of its numbers."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_BYTES), "little")
        try:
            if length > _LARGEST_HEADER:
                raise ValueError("the header is too long")
            entries = json.loads(stream.read(length))
            found = {
                name: (prod(entry["shape"]) * _STORED[entry["dtype"]], _STORED[entry["dtype"]])
                for name, entry in entries.items()
                if name != "__metadata__"
            }
            ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
            if file.stat().st_size < _HEADER_BYTES + length + max(ends, default=0):
                raise ValueError("the file ends before its tensors do")
            return found
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is no safetensors file, or is cut off: download it again") from error
