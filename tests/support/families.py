"""Families of transformers' models that the embedded engine serves, small and with random weights."""

from __future__ import annotations

from typing import Any

VOCABULARY = 300
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# A window that is shorter than every prompt here.
WINDOW = 24
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("Llama", {"num_key_value_heads": 1}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "phi3": ("Phi3", {}),
    "phi3-longrope": ("Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 256}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": WINDOW}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
}

# Models of streamed layers have experts, tied embeddings and biases as well.
STREAMED: dict[str, tuple[str, dict[str, Any]]] = FAMILIES | {
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
}

LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
PER_LAYER = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": LINEAR,
    },
}
# Those whose keys can be moved, in all ways in which models rotate them.
ROTATED: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: kind for name, kind in FAMILIES.items() if name != "phi3-longrope"},
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "a part of the head": ("Phi", {}),
    "a part of the head, dimensions side by side": ("Glm", {"head_dim": 16}),
    "dimensions side by side": ("Cohere", {}),
    "layers without positions": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}),
    "frequencies by kind of layer": ("Gemma3Text", PER_LAYER),
}
WINDOWED = ("qwen2-window", "mistral-window", "gemma2", "frequencies by kind of layer")


def make_model(name: str, sizes: dict[str, Any] | None = None, *, seed: int = 0, **others: Any) -> Any:
    """Random weights, large enough for attention to matter."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**(SIZES if sizes is None else sizes) | others)
    torch.manual_seed(seed)
    model = next(
        getattr(transformers, name.removesuffix("Text") + ending)(config)
        for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
        if hasattr(transformers, name.removesuffix("Text") + ending)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval()


def family(name: str, **changes: Any) -> Any:
    kind, settings = (STREAMED | ROTATED)[name]
    return make_model(kind, **settings | changes)
