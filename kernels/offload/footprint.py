"""Footprint of a causal language model: the bytes of its weights, KV and workspace, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ragorder.kernels.unsupported import UnsupportedModelError

__all__ = ["Footprint", "decoder_layers", "footprint", "skeleton"]

# Requests whose logits are computed in one step, unless the caller says.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of weights: of each decoder layer, of the embedding, of the head (0 if it is the embedding), and of what
    else lies outside the layers. `kv_token`: of a token's keys and values in all layers."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    other: int
    kv_token: int
    itemsize: int
    hidden: int
    inner: int
    attended: int
    vocabulary: int

    @property
    def outside(self) -> int:
        """All weights outside the decoder layers, which stay on the device."""
        return self.embedding + self.head + self.other

    @property
    def weights(self) -> int:
        return sum(self.layers) + self.outside

    def workspace(self, tokens: int, rows: int = _ROWS) -> int:
        """Most bytes of activations while a step of `tokens` tokens is computed, `rows` of them with logits (RAGDoll
        4.2).

        A step holds its hidden states twice; beside them the larger of attention's queries, keys, values and output,
        and of the MLP's three inner products. Norms and logits are computed in fp32."""
        states = 2 * self.hidden * self.itemsize + 2 * self.hidden * 4
        widest = max(2 * self.attended, 3 * self.inner) * self.itemsize
        logits = min(rows, tokens) * self.vocabulary * (self.itemsize + 4)
        return tokens * (states + widest) + logits


def skeleton(config: Any, dtype: torch.dtype | None = None) -> Any:
    """The model of a configuration without weights: all its parameters are on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **({} if dtype is None else {"dtype": dtype}))


def decoder_layers(model: Any) -> tuple[str, Any]:
    """The name and the list of a model's decoder layers. Raises UnsupportedModelError."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and any(True for _ in module.parameters())
    ]
    # Outermost first: a list of experts may be as long by chance.
    outermost = [each for each in found if not any(each[0].startswith(f"{name}.") for name, _ in found)]
    if len(outermost) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be streamed: it has {len(outermost)} lists of {count} layers, and one is "
            "needed; leave device_bytes out"
        )
    return outermost[0]


def footprint(config: Any, dtype: torch.dtype | str | None = None) -> Footprint:
    """Of a model with this configuration (`transformers.AutoConfig`). `dtype` of the weights: the configuration's
    unless given, float32 if it has none.

    Raises UnsupportedModelError for a model without one list of decoder layers.
    """
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
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    itemsize = int(kind.itemsize)
    return Footprint(
        layers=sizes,
        embedding=_bytes(embedding),
        head=0 if head is None else _bytes(head),
        other=sum(map(_bytes, rest.values())),
        kv_token=len(sizes) * 2 * kv_heads * head_dim * itemsize,
        itemsize=itemsize,
        hidden=text.hidden_size,
        inner=_inner(text),
        attended=(2 * heads + 2 * kv_heads) * head_dim,
        vocabulary=text.vocab_size,
    )


def _inner(config: Any) -> int:
    """Inner numbers that a token's MLP computes, over all experts that it is sent to."""
    dense = int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)
    experts = int(getattr(config, "num_experts_per_tok", None) or 0)
    return max(dense, experts * int(getattr(config, "moe_intermediate_size", None) or dense))


def _bytes(tensor: Any) -> int:
    return int(tensor.numel()) * int(tensor.dtype.itemsize)
