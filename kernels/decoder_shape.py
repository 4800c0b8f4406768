"""Widths of a decoder, and what a token and a step take by them. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["ROWS", "DecoderShape", "read_width"]

ROWS = 64
"""Requests whose logits are computed in one step, unless the caller says."""


def read_width(config: Mapping[str, Any], where: str, *names: str, default: int | None = None) -> int:
    """The first of these numbers that a configuration has. Raises ValueError for none, and for what is no number."""
    value = next((config[each] for each in names if config.get(each) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where} has no {names[0]}, or one that is no number: it is no decoder's configuration")
    return value


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """`inner`: numbers that a token's MLP computes between its matrices, over all experts that it is sent to."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str) -> Self:
        """Of a configuration, as its config.json has it; `where` begins the message. Raises ValueError."""
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
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def workspace(self, tokens: int, itemsize: int, rows: int = ROWS) -> int:
        """Most bytes of activations while a step of `tokens` tokens is computed, `rows` of them with logits (RAGDoll
        4.2).

        A step holds its hidden states twice; beside them the larger of attention's queries, keys, values and output,
        and of the MLP's three inner products. Norms and logits are computed in fp32."""
        attended = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        states = 2 * self.hidden * (itemsize + 4)
        widest = max(2 * attended, 3 * self.inner) * itemsize
        return tokens * (states + widest) + min(rows, tokens) * self.vocabulary * (itemsize + 4)
