"""The chain model as a stock LlamaForCausalLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragorder.benchmarks.fusion.fusion.model import EPSILON, THETA, ChainModel
from ragorder.benchmarks.fusion.fusion.task import OPENING, VOCABULARY

__all__ = ["llama", "llama_tokens"]

_LONGEST_TOKENS = 4096
_IDLE_UNITS = 4096


def llama(model: ChainModel, idle_layers: int = 0) -> Any:
    """The same model in transformers' terms. Its token b * VOCABULARY + t is t behind b; its answers are tokens t.

    `idle_layers` in front of the last one change nothing, and take the time of a larger model's, as do further units of
    all layers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    width, layers = model.width, model.passes + idle_layers
    units = max(2 * width, _IDLE_UNITS) if idle_layers else 2 * width
    config: Any = LlamaConfig(
        vocab_size=VOCABULARY**2,
        hidden_size=width,
        intermediate_size=units,
        num_hidden_layers=layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.heads,
        head_dim=model.head_dim,
        max_position_embeddings=_LONGEST_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=EPSILON,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        made: Any = LlamaForCausalLM(config)
    query, key, value = model.weights["qkv"].chunk(3)
    gate, up = (pad(each, (0, 0, 0, units - 2 * width)) for each in model.weights["up"].chunk(2))
    head = torch.zeros(VOCABULARY**2, width)
    head[:VOCABULARY] = model.weights["head"]
    state = {"model.embed_tokens.weight": _pairs(model), "model.norm.weight": model.weights["norm"]}
    state["lm_head.weight"] = head
    for layer in range(layers):
        idle = model.passes - 1 <= layer < layers - 1
        of_layer = {
            "self_attn.q_proj": query,
            "self_attn.k_proj": key,
            "self_attn.v_proj": value,
            "self_attn.o_proj": model.weights["output"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": pad(model.weights["down"], (0, units - 2 * width)),
            "input_layernorm": model.weights["attention_norm"],
            "post_attention_layernorm": model.weights["mlp_norm"],
        }
        for name, weight in of_layer.items():
            state[f"model.layers.{layer}.{name}.weight"] = torch.zeros_like(weight) if idle else weight.clone()
    made.load_state_dict(state)
    return made.eval().requires_grad_(False)


def llama_tokens(tokens: Sequence[int]) -> list[int]:
    """A prompt in the tokens of `llama`. What opens a document or a question is the same behind everything."""
    behind = (0 if token in OPENING else before for before, token in zip([0, *tokens], tokens, strict=False))
    return [before * VOCABULARY + token for before, token in zip(behind, tokens, strict=True)]


def _pairs(model: ChainModel) -> Tensor:
    every = torch.arange(VOCABULARY)
    return torch.cat([model.embed(every, torch.full_like(every, before)) for before in range(VOCABULARY)])
