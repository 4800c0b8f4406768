"""A small language model that can be trained in minutes to follow chains of documents.

A Llama (RMSNorm, RoPE, SwiGLU) whose layers share their weights, since what it has learnt to look up once it can then
chain, and whose embedding of a token contains the token before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, pad, rms_norm, silu

from ragorder.benchmarks.fusion.fusion.task import OPENING, VOCABULARY

__all__ = ["EPSILON", "THETA", "ChainModel", "previous", "rotate"]

THETA = 5e5
EPSILON = torch.finfo(torch.float32).eps

_WIDTH, _HEADS, _PASSES = 128, 4, 3
_TRAINED = ("embedding", "head", "norm", "attention_norm", "qkv", "output", "mlp_norm", "up", "down")
_FIXED = ("back",)


@dataclass(frozen=True, slots=True)
class ChainModel:
    """Weights by name, shared by all `passes`."""

    weights: dict[str, Tensor]
    heads: int = _HEADS
    passes: int = _PASSES

    @classmethod
    def random(cls, seed: int, *, width: int = _WIDTH, heads: int = _HEADS, passes: int = _PASSES) -> Self:
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            return scale * torch.randn(rows, columns, generator=generator)

        narrow, residual = width**-0.5, (2 * passes) ** -0.5
        weights = {
            "embedding": normal(VOCABULARY, width, 1),
            "head": normal(VOCABULARY, width, narrow),
            "norm": torch.ones(width),
            "attention_norm": torch.ones(width),
            "qkv": normal(3 * width, width, narrow),
            "output": normal(width, width, narrow * residual),
            "mlp_norm": torch.ones(width),
            "up": normal(4 * width, width, narrow),
            "down": normal(width, 2 * width, (2 * width) ** -0.5 * residual),
            "back": 0.7 * torch.linalg.qr(normal(width, width, 1))[0],
        }
        return cls(weights, heads, passes)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises OSError, or ValueError for a file that is no such model."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                weights = {name: file.get_tensor(name).float() for name in (*_TRAINED, *_FIXED)}
                sizes = {name: int(value) for name, value in (file.metadata() or {}).items()}
            return cls(weights, sizes["heads"], sizes["passes"])
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path} is no model of ragorder eval run fusion-training: {error}") from None

    def save(self, path: Path) -> None:
        """In half precision."""
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.detach().half().contiguous() for name, weight in self.weights.items()}
        save_file(weights, path, metadata={"heads": str(self.heads), "passes": str(self.passes)})

    def rounded(self) -> Self:
        """As `save` and `load` leave it."""
        return replace(self, weights={name: weight.detach().half().float() for name, weight in self.weights.items()})

    @property
    def width(self) -> int:
        return int(self.weights["head"].shape[1])

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def trained(self) -> Iterator[Tensor]:
        return (self.weights[name] for name in _TRAINED)

    def embed(self, tokens: Tensor, before: Tensor) -> Tensor:
        """Of tokens, each with the token before it; what opens a document or a question has none."""
        first = torch.isin(tokens, torch.tensor(OPENING))
        table = self.weights["embedding"]
        glance = embedding(before, table) @ self.weights["back"]
        return embedding(tokens, table) + glance * ~first[..., None]

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, scaled, keys and values (B, heads, T, head_dim), without positions."""
        batch, tokens, _ = hidden.shape
        projected = linear(self._norm(hidden, "attention_norm"), self.weights["qkv"])
        query, key, value = projected.view(batch, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return query * self.head_dim**-0.5, key, value

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The rest of a layer, from attention's output (B, heads, T, head_dim)."""
        hidden = hidden + linear(attended.transpose(1, 2).flatten(2), self.weights["output"])
        gate, up = linear(self._norm(hidden, "mlp_norm"), self.weights["up"]).chunk(2, -1)
        return hidden + linear(silu(gate) * up, self.weights["down"])

    def normed(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden, "norm")

    def logits(self, normed: Tensor) -> Tensor:
        return linear(normed, self.weights["head"])

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return rms_norm(hidden, (self.width,), self.weights[name], EPSILON)


def previous(tokens: Tensor) -> Tensor:
    return pad(tokens, (1, 0))[:, :-1]


def rotate(states: Tensor, positions: Tensor) -> Tensor:
    """RoPE of queries or keys (B, heads, T, head_dim) at positions (B or 1, T)."""
    half = states.shape[-1] // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(THETA) / half))
    angles = positions[:, None, :, None] * frequencies
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)
