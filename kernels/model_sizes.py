"""Sizes of a model from its files, without torch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from ragorder.common.jsonl import decode
from ragorder.pipelining.placement.base import ROWS, ModelSizes


def read_width(config: Mapping[str, Any], where: str, *names: str, default: int | None = None) -> int:
    """Return the first entry present. Raises ValueError, naming `where`, unless it is a positive integer."""
    value = next((config[each] for each in names if config.get(each) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{where} has no {names[0]}, or none that is a positive number: give a decoder's configuration"
        )
    return value


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """`inner`: width of a token's MLP, summed over the experts that it uses."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Self:
        layers = read_width(config, where, "num_hidden_layers", "n_layer", "num_layers")
        hidden = read_width(config, where, "hidden_size", "n_embd", "d_model")
        heads = read_width(config, where, "num_attention_heads", "n_head", "num_heads")
        dense = read_width(config, where, "intermediate_size", "n_inner", default=4 * hidden)
        routed = 0
        if config.get("num_experts_per_tok"):
            expert = read_width(config, where, "moe_intermediate_size", default=dense)
            routed = read_width(config, where, "num_experts_per_tok") * expert
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=read_width(config, where, "num_key_value_heads", "num_kv_heads", default=heads),
            head_dim=read_width(config, where, "head_dim", default=max(1, hidden // heads)),
            inner=max(dense, routed),
            vocabulary=read_width(config, where, "vocab_size"),
        )

    def kv_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def workspace(self, tokens: int, itemsize: int, rows: int = ROWS) -> int:
        """Return the maximum bytes of a step's activations, `rows` tokens with logits (RAGDoll 4.2). Norms and logits
        are in fp32."""
        attended = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        states = 2 * self.hidden * (itemsize + 4)
        widest = max(2 * attended, 3 * self.inner) * itemsize
        return tokens * (states + widest) + min(rows, tokens) * self.row_bytes(itemsize)

    def row_bytes(self, itemsize: int) -> int:
        """Return the bytes of a request's logits."""
        return self.vocabulary * (itemsize + 4)

    def sizes(
        self,
        layers: Sequence[int],
        outside: int,
        itemsize: int,
        *,
        block_tokens: int,
        longest: int | None = None,
        staging: int = 0,
    ) -> ModelSizes:
        """Return the sizes of a model with these weights."""
        # The workspace is linear up to ROWS tokens, and beyond.
        steps = (1, ROWS, 2 * ROWS)
        return ModelSizes(
            layers=tuple(layers),
            outside=outside,
            kv_token=self.kv_token(itemsize),
            step_bytes=tuple((step, self.workspace(step, itemsize)) for step in steps),
            row_bytes=self.row_bytes(itemsize),
            itemsize=itemsize,
            block_tokens=block_tokens,
            staging=staging,
            longest=longest,
        )


def exact_length(config: Mapping[str, Any]) -> int | None:
    """Return the tokens up to which a model's cached keys stay valid, or None."""
    # LongRoPE (Phi-3 128k) changes its frequencies beyond the original window, which invalidates cached keys.
    original = config.get("original_max_position_embeddings")
    limits = [config.get("max_position_embeddings"), config.get("n_positions")]
    longropes = [rope for rope in ropes(config) if rope.get("rope_type") == "longrope"]
    limits += [rope.get("original_max_position_embeddings") or original for rope in longropes]
    return min((limit for limit in limits if limit), default=None)


def ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of rotary positions, of each type of layer if they differ."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, Mapping):
        nested = [entry for entry in rope.values() if isinstance(entry, Mapping)]
        yield from nested or [rope]


def quantised_words(config: Mapping[str, Any]) -> str | None:
    """Say why quantised weights cannot be streamed and who serves them, or return None for other weights."""
    entries = config.get("quantization_config")
    if not isinstance(entries, Mapping):
        return None
    method = entries.get("quant_method", "unknown")
    return (
        f"its weights are quantised ({getattr(method, 'value', method)}), and ragorder's engine converts them when it "
        "loads them, so that it cannot stream them. vLLM and llama.cpp serve them: `ragorder doctor --memory --for "
        "vllm|llama.cpp` prints their command"
    )


_ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
_STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_STORED |= {"F8_E4M3": 1, "F8_E5M2": 1}
_LAYER = re.compile(r"^(.*?)\.(\d+)\.")
# A safetensors file begins with the length of its header.
_HEADER_BYTES = 8
_LARGEST_HEADER = 100_000_000
_ALIGNMENT = 512


def model_sizes(path: Path | str, *, dtype: str | None = None, block_tokens: int = 16) -> ModelSizes:
    """Read sizes from a folder's safetensors headers, or compute them from a config.json. `dtype` replaces that of
    weights and KV. Raises OSError, and ValueError for models other than decoders."""
    path = Path(path)
    if dtype is not None and dtype not in _ITEMSIZES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(_ITEMSIZES)}")
    config, file = read_config(path)
    parameters = _Parameters(config, str(file))
    shape = parameters.shape
    itemsize = _ITEMSIZES[dtype] if dtype else parameters.itemsize
    if path.is_dir():
        layers, outside, stored = _of_weights(path, shape.layers, tied=parameters.tied)
        if quantised_words(config):
            # They stay as they are stored.
            pass
        elif dtype:
            # Stored weights are converted when they are loaded.
            layers, outside = [size * itemsize // stored for size in layers], outside * itemsize // stored
        else:
            itemsize = stored
    else:
        layers, outside = [parameters.layer * itemsize] * shape.layers, parameters.outside * itemsize
    return shape.sizes(layers, outside, itemsize, block_tokens=block_tokens, longest=exact_length(config))


def read_config(path: Path) -> tuple[Mapping[str, Any], Path]:
    """Return the configuration of a folder, or in a file, and its file. Raises OSError, ValueError."""
    if not path.exists():
        raise ValueError(f"there is no {path}: give the folder of a model, or its config.json")
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is not a model's folder: it has no config.json")
    try:
        config = decode(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: give the config.json of a model") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model's configuration: give its config.json")
    # In models with several parts, the part that generates.
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config, file


class _Parameters:
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.shape = shape = DecoderShape.read(config, where)
        hidden, heads, kv_heads = shape.hidden, shape.heads, shape.kv_heads
        # As in GPT-2: two matrices with four times the hidden size between them, and learnt positions.
        plain = "n_embd" in config
        inner = read_width(config, where, "intermediate_size", "n_inner", default=4 * hidden)
        experts = read_width(config, where, "num_local_experts", "num_experts", "n_routed_experts", default=1)
        if experts > 1:
            inner = read_width(config, where, "moe_intermediate_size", default=inner)
        attention = 2 * hidden * (heads + kv_heads) * shape.head_dim
        mlp = experts * (2 if plain else 3) * hidden * inner + (experts * hidden if experts > 1 else 0)
        norms = (4 if plain else 2) * hidden
        qkv_bias = plain or config.get("attention_bias") or config.get("model_type") in ("qwen2", "qwen2_moe")
        biases = (heads + 2 * kv_heads) * shape.head_dim if qkv_bias else 0
        if plain:
            biases += 2 * hidden + inner
        self.layer = attention + mlp + norms + biases
        positions = read_width(config, where, "n_positions", default=1024) * hidden if plain else 0
        final_norm = (2 if plain else 1) * hidden
        self.tied = bool(config.get("tie_word_embeddings", plain))
        self.outside = shape.vocabulary * hidden * (1 if self.tied else 2) + positions + final_norm
        self.itemsize = _ITEMSIZES.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), 4)


def _of_weights(folder: Path, layers: int, *, tied: bool) -> tuple[list[int], int, int]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no weights (*.safetensors): give only its config.json for an estimate")
    tensors: dict[str, tuple[int, int]] = {}
    for file in files:
        tensors |= _header(file)
    if tied:
        # Some checkpoints store it twice; it is loaded once.
        tensors = {name: size for name, size in tensors.items() if not name.endswith("lm_head.weight")}
    lists: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    by_itemsize: dict[int, int] = defaultdict(int)
    for name, (size, itemsize) in tensors.items():
        by_itemsize[itemsize] += size
        if found := _LAYER.match(name):
            # Alignment in a layer's buffer.
            lists[found[1]][int(found[2])] += -(-size // _ALIGNMENT) * _ALIGNMENT
    decoders = [name for name, sizes in lists.items() if sorted(sizes) == list(range(layers))]
    if not decoders:
        raise ValueError(f"{folder} lacks weights: no list of {layers} layers is among its {len(tensors)} tensors")
    prefix = max(decoders, key=lambda name: sum(lists[name].values()))
    outside = sum(size for name, (size, _) in tensors.items() if not name.startswith(f"{prefix}."))
    return [lists[prefix][number] for number in range(layers)], outside, max(by_itemsize, key=by_itemsize.__getitem__)


def _header(file: Path) -> dict[str, tuple[int, int]]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_HEADER_BYTES), "little")
        try:
            if length > _LARGEST_HEADER:
                raise ValueError("the header is too long")
            entries = decode(stream.read(length))
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
            raise ValueError(f"{file} is not a safetensors file, or truncated: download it again") from error
