"""Widths of a decoder, and the memory derived from them, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["ROWS", "DecoderShape", "read_width"]

ROWS = 64
"""Default number of requests with logits in one step."""


def read_width(config: Mapping[str, Any], where: str, *names: str, default: int | None = None) -> int:
    value = next((config[each] for each in names if config.get(each) is not None), default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"{where} has no {names[0]}, or none that is a positive number: give a decoder's configuration"
        )
    return value


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """`inner` counts the numbers that a token's MLP computes between its matrices, over all its experts."""

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
        """Return the most bytes of activations in a step of `tokens` tokens, `rows` of them with logits (RAGDoll 4.2).

        A step holds its hidden states twice, and the larger of attention's and of the MLP's vectors. Norms and logits
        are in fp32.
        """
        attended = (2 * self.heads + 2 * self.kv_heads) * self.head_dim
        states = 2 * self.hidden * (itemsize + 4)
        widest = max(2 * attended, 3 * self.inner) * itemsize
        return tokens * (states + widest) + min(rows, tokens) * self.row_bytes(itemsize)

    def row_bytes(self, itemsize: int) -> int:
        """Return the bytes of a request's logits."""
        return self.vocabulary * (itemsize + 4)
