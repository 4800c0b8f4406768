"""A synthetic task of chains of two documents, and a model of it in plain torch.

A document has lines of three tokens: definitions `alias value ;`, links `name alias ;` whose alias another document
defines, and a line of filler. `ASK name` asks for the value. Names, aliases and values are drawn for each corpus, so no
answer can be memorised.
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

BOS, DOC, END, ASK, ALIAS_OF = range(5)
VALUES = range(5, 37)
ALIASES = range(37, 165)
NAMES = range(165, 293)
WORDS = range(293, 309)
_OPENING = (DOC, ASK, ALIAS_OF)
_VOCABULARY = 309
_DEFINITIONS, _LINKS = 2, 3
"""Lines of a document."""

_LINE_TOKENS = 3
_FILLER_TOKENS = 2
DOCUMENT_TOKENS = 1 + _LINE_TOKENS * (_DEFINITIONS + _LINKS) + _FILLER_TOKENS


@dataclass(frozen=True, slots=True)
class Chains:
    """Each link and the definition that it refers to, (corpora, links) each."""

    names: Tensor
    aliases: Tensor
    values: Tensor
    shown: Tensor
    """Whether the link spells the value out."""

    documents: Tensor
    """(corpora, links, 2): of the link, and of the definition."""


@dataclass(frozen=True, slots=True)
class Corpora:
    tokens: Tensor
    """int64 (corpora, documents, document tokens)."""

    lines: Tensor
    """As `tokens`: at a link's second token 1 + its number, elsewhere 0."""

    chains: Chains


def draw_corpora(
    count: int, documents: int, generator: torch.Generator, *, shown: float = 0.0, topic: int | None = None
) -> Corpora:
    """Draw corpora; a share `shown` of the links spells its value out, `topic` documents refer only to each other."""
    definitions, links = documents * _DEFINITIONS, documents * _LINKS
    aliases = _distinct(count, ALIASES, definitions, generator)
    names = _distinct(count, NAMES, links, generator)
    values = torch.randint(VALUES.start, VALUES.stop, (count, definitions), generator=generator)
    referred = _elsewhere(count, documents, topic or documents, generator)
    chains = Chains(
        names=names,
        aliases=aliases.gather(1, referred),
        values=values.gather(1, referred),
        shown=torch.rand(names.shape, generator=generator) < shown,
        documents=torch.stack([_owners(documents).expand_as(referred), referred // _DEFINITIONS], -1),
    )
    third = torch.where(chains.shown, chains.values, END)
    defining = torch.stack([aliases, values, torch.full_like(values, END)], -1)
    referring = torch.stack([chains.names, chains.aliases, third], -1)
    numbers = torch.zeros_like(referring)
    numbers[..., 1] = 1 + torch.arange(links)
    filler = torch.randint(WORDS.start, WORDS.stop, (count, documents, _FILLER_TOKENS), generator=generator)
    text = [defining, referring, filler]
    marks = [torch.zeros_like(defining), numbers, torch.zeros_like(filler)]
    # Each line moves as a whole: its tokens share a key, and the sort is stable.
    lengths = [_LINE_TOKENS] * (_DEFINITIONS + _LINKS) + [_FILLER_TOKENS]
    keys = torch.rand(count, documents, len(lengths), generator=generator)
    order = keys.repeat_interleave(torch.tensor(lengths), 2).argsort(stable=True, dim=2)
    first = torch.full((count, documents, 1), DOC)
    tokens, lines = (
        torch.cat([part.reshape(count, documents, -1) for part in parts], 2).gather(2, order) for parts in (text, marks)
    )
    return Corpora(torch.cat([first, tokens], 2), torch.cat([torch.zeros_like(first), lines], 2), chains)


def _distinct(count: int, among: range, taken: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, len(among), generator=generator).argsort(1)[:, :taken] + among.start


def _owners(documents: int) -> Tensor:
    """The document of each link."""
    return torch.arange(documents * _LINKS) // _LINKS


def _elsewhere(count: int, documents: int, topic: int, generator: torch.Generator) -> Tensor:
    """For each link a definition in another document of its topic."""
    drawn = torch.randint((topic - 1) * _DEFINITIONS, (count, documents * _LINKS), generator=generator)
    own = _owners(documents)
    drawn += own // topic * topic * _DEFINITIONS
    return drawn + _DEFINITIONS * (drawn // _DEFINITIONS >= own)


_THETA = 5e5
_EPSILON = torch.finfo(torch.float32).eps
_WIDTH, _HEADS, _PASSES = 128, 4, 3
_TRAINED = ("embedding", "head", "norm", "attention_norm", "qkv", "output", "mlp_norm", "up", "down")
_FIXED = ("back",)


@dataclass(frozen=True, slots=True)
class ChainModel:
    """Weights by name, shared by all `passes`, of a small model that can be trained in minutes to follow chains.

    A Llama (RMSNorm, RoPE, SwiGLU) whose layers share their weights, since what it has learnt to look up once it can
    then chain, and whose embedding of a token contains the token before it.
    """

    weights: dict[str, Tensor]
    heads: int = _HEADS
    passes: int = _PASSES

    @classmethod
    def random(cls, seed: int) -> Self:
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            return scale * torch.randn(rows, columns, generator=generator)

        width, narrow, residual = _WIDTH, _WIDTH**-0.5, (2 * _PASSES) ** -0.5
        weights = {
            "embedding": normal(_VOCABULARY, width, 1),
            "head": normal(_VOCABULARY, width, narrow),
            "norm": torch.ones(width),
            "attention_norm": torch.ones(width),
            "qkv": normal(3 * width, width, narrow),
            "output": normal(width, width, narrow * residual),
            "mlp_norm": torch.ones(width),
            "up": normal(4 * width, width, narrow),
            "down": normal(width, 2 * width, (2 * width) ** -0.5 * residual),
            "back": 0.7 * torch.linalg.qr(normal(width, width, 1))[0],
        }
        return cls(weights)

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
            raise ValueError(f"{path} is no model of ragorder eval run toy-training: {error}") from None

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

    def embed(self, tokens: Tensor) -> Tensor:
        """Of prompts (B, T), each token with the one before it; what opens a document or a question has none."""
        first = torch.isin(tokens, torch.tensor(_OPENING))
        table = self.weights["embedding"]
        glance = embedding(pad(tokens, (1, 0))[:, :-1], table) @ self.weights["back"]
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
        return rms_norm(hidden, (self.width,), self.weights[name], _EPSILON)


def _rotate(states: Tensor) -> Tensor:
    """RoPE of queries or keys (B, heads, T, head_dim)."""
    half = states.shape[-1] // 2
    frequencies = torch.exp(torch.arange(half) * (-math.log(_THETA) / half))
    angles = torch.arange(states.shape[2])[:, None] * frequencies
    cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    first, second = states.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


_HIDDEN = -1e4


def hidden_states(model: ChainModel, tokens: Tensor, start: int | None = None) -> tuple[Tensor, Tensor]:
    """Return normed states (B, T, width) of prompts (B, T) at the end, and before the last pass; before this one tokens
    from `start` on do not see the documents."""
    hidden, length = model.embed(tokens), tokens.shape[1]
    causal = torch.full((length, length), _HIDDEN).triu(1)
    late = causal.clone()
    if start is not None:
        late[start:, 1:start] = _HIDDEN
    for layer in range(model.passes):
        middle, last = model.normed(hidden), layer == model.passes - 1
        query, key, value = model.project(hidden)
        scores = _rotate(query) @ _rotate(key).transpose(-1, -2)
        # On a CPU and at these lengths 10 to 60 % faster than the fused function, with its backward pass.
        weights = (scores + (causal if last else late).to(scores.dtype)).softmax(-1)
        attended = weights.to(value.dtype) @ value
        hidden = model.finish(hidden, attended)
    return model.normed(hidden), middle
