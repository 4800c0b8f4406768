"""A Llama with random weights in files, one a layer, so that no more than a layer is ever in memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from ragorder.benchmarks.doll.streaming.record import StreamingCell
from ragorder.kernels.offload.model_memory import skeleton

__all__ = ["VOCABULARY", "write_model"]

VOCABULARY = 1024
_HEAD = 64


def write_model(folder: Path, cell: StreamingCell, seed: int) -> Path:
    heads = cell.hidden_size // _HEAD
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=cell.hidden_size,
        intermediate_size=cell.intermediate_size,
        num_hidden_layers=cell.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=_HEAD,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, Any] = {name: tensor.shape for name, tensor in skeleton(config).state_dict().items()}
    files: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    index = {name: file for file, names in files.items() for name in names}
    for file, names in files.items():
        save_file(_weights(names, generator), folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}), "utf-8")
    return folder


def _weights(shapes: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }
