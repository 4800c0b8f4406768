"""Bytes of a language model, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AutoModelForCausalLM

from ragorder.kernels.model_sizes import DecoderShape
from ragorder.kernels.models.loading import loading
from ragorder.kernels.models.support import UnsupportedModelError
from ragorder.pipelining.placement.base import ROWS, ModelSizes


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes of weights (`head` is 0 if it is the embedding), KV and workspace."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    other: int
    itemsize: int
    shape: DecoderShape

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype | str | None = None) -> Self:
        """Measure a `transformers.AutoConfig`, in `dtype`, its own or float32. Raises UnsupportedModelError."""
        named = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        kind = named or getattr(config, "dtype", None) or torch.float32
        model = skeleton(config, kind)
        prefix, layers = decoder_layers(model)
        sizes = tuple(sum(map(_bytes, layer.parameters())) for layer in layers)
        embedding = model.get_input_embeddings().weight
        output = model.get_output_embeddings()
        head = output.weight if output is not None and output.weight is not embedding else None
        counted = {id(embedding), id(head)}
        rest = {
            id(each): each
            for name, each in model.named_parameters()
            if not name.startswith(f"{prefix}.") and id(each) not in counted
        }
        text = config.get_text_config()
        entries = text.to_dict()
        # Some families use other names for these.
        entries |= {name: entries[own] for name, own in text.attribute_map.items() if own in entries}
        return cls(
            layers=sizes,
            embedding=_bytes(embedding),
            head=0 if head is None else _bytes(head),
            other=sum(map(_bytes, rest.values())),
            itemsize=int(kind.itemsize),
            shape=DecoderShape.read(entries, type(text).__name__),
        )

    @property
    def outside(self) -> int:
        return self.embedding + self.head + self.other

    @property
    def weights(self) -> int:
        return sum(self.layers) + self.outside

    @property
    def kv_token(self) -> int:
        return self.shape.kv_token(self.itemsize)

    def workspace(self, tokens: int, rows: int = ROWS) -> int:
        return self.shape.workspace(tokens, self.itemsize, rows)

    def sizes(self, *, slot: int, **options: Any) -> ModelSizes:
        """Return sizes for a plan, as `DecoderShape.sizes` does, with at least `slot` bytes a layer."""
        layers = [max(slot, each) for each in self.layers]
        return self.shape.sizes(layers, self.outside, self.itemsize, **options)


def skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    with loading(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **({} if dtype is None else {"dtype": dtype}))


def decoder_layers(model: Any) -> tuple[str, Any]:
    """Return name and list of the decoder layers. Raises UnsupportedModelError unless there is one list."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and any(True for _ in module.parameters())
    ]
    # A list of experts may have the same length.
    outermost = [each for each in found if not any(each[0].startswith(f"{name}.") for name, _ in found)]
    if len(outermost) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be streamed: it has {len(outermost)} lists of {count} layers, but one is "
            "needed; leave device_bytes out"
        )
    return outermost[0]


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.dtype.itemsize)
