"""Models that can be served exactly, by configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ragorder.errors import RagorderError
from ragorder.kernels.model_sizes import exact_length, ropes


class UnsupportedModelError(RagorderError, ValueError):
    """A model cannot be served exactly, or cannot reuse KV at other positions."""


_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

# Entries that change attention or the cached KV: their harmless values, and the feature of any other value.
_REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "kv_lora_rank": ((None, 0), "multi-head latent attention (MLA), whose cache is not keys and values"),
    "num_kv_shared_layers": ((None, 0), "layers that share other layers' keys and values"),
    "attention_chunk_size": ((None, 0), "attention in chunks"),
    "use_bidirectional_attention": ((None, False), "bidirectional attention"),
    "is_encoder_decoder": ((None, False), "an encoder and cross attention"),
    "add_cross_attention": ((None, False), "cross attention"),
    "cross_attention_layers": ((None, (), []), "cross attention"),
    "alibi": ((None, False), "ALiBi position biases"),
    "position_bias": ((None, False), "position biases"),
    "is_causal": ((None, True), "attention that is not causal"),
}


def text_config(model: Any) -> Any:
    return model.config.get_text_config()


def check_model(model: Any) -> None:
    reasons = list(dict.fromkeys(_reasons(model)))
    if reasons:
        raise UnsupportedModelError(f"{_name(model)} cannot be served exactly: it has {'; '.join(reasons)}")


def longest_exact_length(model: Any) -> int | None:
    """Return the tokens up to which cached keys stay valid, or None."""
    return exact_length(text_config(model).to_dict())


def _name(model: Any) -> str:
    return f"{type(model).__name__} ({getattr(model.config, 'model_type', 'unknown')})"


def _reasons(model: Any) -> Iterator[str]:
    config = text_config(model)
    for entry, (harmless, reason) in _REFUSED.items():
        if not any(getattr(config, entry, None) == value for value in harmless):
            yield reason
    if getattr(type(model), "_is_stateful", False):
        yield "a recurrent state (linear attention or a state space) instead of keys and values"
    foreign = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if foreign:
        yield f"layers of {', '.join(sorted(foreign))}"
    for rope in ropes(config.to_dict()):
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" in kind:
            yield f"rotary positions ({kind} NTK) whose frequencies depend on the length of the sequence"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in model.named_parameters()):
        yield "attention sinks"
    if not getattr(type(model), "_supports_attention_backend", False):
        yield "its own attention instead of transformers' AttentionInterface"
