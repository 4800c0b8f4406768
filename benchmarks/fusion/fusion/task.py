"""A synthetic task of chains of documents, a model of it, and reuse of KV in plain torch.

A document has lines of three tokens: definitions `alias value ;`, links `name alias ;` whose alias another document
defines, for three hops relays `alias alias ;` between them, and a line of filler. `ASK name` asks for the value. Names,
aliases and values are drawn for each corpus, so no answer can be memorised.
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

from ragorder.benchmarks.fusion.fusion.cells import CORPUS_DOCUMENTS

BOS, DOC, END, ASK, ALIAS_OF = range(5)
OPENING = (DOC, ASK, ALIAS_OF)
VALUES = range(5, 37)
ALIASES = range(37, 165)
NAMES = range(165, 293)
WORDS = range(293, 309)
VOCABULARY = 309
_DEFINITIONS = 2
_LINE_TOKENS = 3
_FILLER_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Level:
    """Documents that a question needs, and those of its prompt. Raises ValueError."""

    hops: int
    documents: int

    def __post_init__(self) -> None:
        if self.hops not in (2, 3):
            raise ValueError(f"hops is {self.hops}: give 2 or 3")
        if not self.hops <= self.documents <= CORPUS_DOCUMENTS:
            raise ValueError(f"documents is {self.documents}: give {self.hops} to {CORPUS_DOCUMENTS}")

    @property
    def relays(self) -> int:
        """Lines of a document that lead from one alias to another."""
        return 2 if self.hops == 3 else 0

    @property
    def links(self) -> int:
        return 2 if self.hops == 3 else 3

    @property
    def document_tokens(self) -> int:
        return 1 + _LINE_TOKENS * (_DEFINITIONS + self.relays + self.links) + _FILLER_TOKENS

    @property
    def tokens(self) -> int:
        """Of all documents of a prompt."""
        return self.documents * self.document_tokens

    @property
    def answer_tokens(self) -> int:
        """Of the lines that a question needs."""
        return _LINE_TOKENS * self.hops


@dataclass(frozen=True, slots=True)
class Chains:
    """What relays and links lead to, (corpora, lines) each: the relays of all documents, then the links."""

    heads: Tensor
    """The name or alias that the line begins with."""

    aliases: Tensor
    """The alias that it refers to."""

    ends: Tensor
    """The alias of the definition at the end."""

    values: Tensor
    shown: Tensor
    """Whether the line spells the value out."""

    hops: Tensor
    """(lines,)"""

    documents: Tensor
    """(corpora, lines, 3): of the line, of the line that it refers to, and of the definition."""


@dataclass(frozen=True, slots=True)
class Corpora:
    tokens: Tensor
    """int64 (corpora, documents, document tokens)."""

    lines: Tensor
    """As `tokens`: at a line's second token 1 + the number of its chain, elsewhere 0."""

    chains: Chains


def draw_corpora(
    count: int,
    level: Level,
    generator: torch.Generator,
    *,
    documents: int = CORPUS_DOCUMENTS,
    shown: float = 0.0,
    topic: int = 0,
) -> Corpora:
    """Draw corpora; a share `shown` of the links spells its value out, `topic` documents refer only to each other."""
    topic = topic or documents
    definitions, relays, links = (documents * each for each in (_DEFINITIONS, level.relays, level.links))
    aliases = _distinct(count, ALIASES, definitions + relays, generator)
    heads = _distinct(count, NAMES, links, generator)
    values = torch.randint(VALUES.start, VALUES.stop, (count, definitions), generator=generator)
    if level.relays:
        # A relay refers to a definition, a link to a relay.
        defined = _elsewhere(count, documents, topic, level.relays, _DEFINITIONS, generator)
        relayed = _elsewhere(count, documents, topic, level.links, level.relays, generator)
        referred = torch.cat([defined, definitions + relayed], 1)
        middle = torch.cat([defined // _DEFINITIONS, relayed // level.relays], 1)
        ends = torch.cat([defined, defined.gather(1, relayed)], 1)
        heads = torch.cat([aliases[:, definitions:], heads], 1)
    else:
        referred = ends = _elsewhere(count, documents, topic, level.links, _DEFINITIONS, generator)
        middle = ends // _DEFINITIONS
    own = torch.cat([_owners(documents, level.relays), _owners(documents, level.links)])
    chains = Chains(
        heads=heads,
        aliases=aliases.gather(1, referred),
        ends=aliases.gather(1, ends),
        values=values.gather(1, ends),
        shown=torch.rand(heads.shape, generator=generator) < shown,
        hops=torch.cat([torch.full((relays,), 2), torch.full((links,), level.hops)]),
        documents=torch.stack([own.expand_as(ends), middle, ends // _DEFINITIONS], -1),
    )
    third = torch.where(chains.shown, chains.values, END)
    defining = torch.stack([aliases[:, :definitions], values, torch.full_like(values, END)], -1)
    referring = torch.stack([chains.heads, chains.aliases, third], -1)
    numbers = torch.zeros_like(referring)
    numbers[..., 1] = 1 + torch.arange(relays + links)
    filler = torch.randint(WORDS.start, WORDS.stop, (count, documents, _FILLER_TOKENS), generator=generator)
    parts = (_DEFINITIONS, defining), (level.relays, referring[:, :relays]), (level.links, referring[:, relays:])
    text = [part.reshape(count, documents, lines * _LINE_TOKENS) for lines, part in parts]
    marks = [torch.zeros_like(defining), numbers[:, :relays], numbers[:, relays:], torch.zeros_like(filler)]
    marks = [mark.reshape(count, documents, -1) for mark in marks if mark.numel()]
    # Each line moves as a whole: its tokens share a key, and the sort is stable.
    lengths = [_LINE_TOKENS] * (_DEFINITIONS + level.relays + level.links) + [_FILLER_TOKENS]
    keys = torch.rand(count, documents, len(lengths), generator=generator)
    order = keys.repeat_interleave(torch.tensor(lengths), 2).argsort(stable=True, dim=2)
    first = torch.full((count, documents, 1), DOC)
    return Corpora(
        tokens=torch.cat([first, torch.cat([*text, filler], 2).gather(2, order)], 2),
        lines=torch.cat([torch.zeros_like(first), torch.cat(marks, 2).gather(2, order)], 2),
        chains=chains,
    )


def _distinct(count: int, among: range, taken: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, len(among), generator=generator).argsort(1)[:, :taken] + among.start


def _owners(documents: int, lines: int) -> Tensor:
    return torch.arange(documents * lines) // max(1, lines)


def _elsewhere(count: int, documents: int, topic: int, lines: int, others: int, generator: torch.Generator) -> Tensor:
    """For each of `lines` a document, one of `others` a document, in another document of its topic."""
    drawn = torch.randint((topic - 1) * others, (count, documents * lines), generator=generator)
    own = _owners(documents, lines)
    drawn += own // topic * topic * others
    return drawn + others * (drawn // others >= own)


THETA = 5e5
EPSILON = torch.finfo(torch.float32).eps
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


_HIDDEN = -1e9


@dataclass(frozen=True, slots=True)
class ReferenceKV:
    """KV of B prompts with S slots, per layer (B, heads, S, head_dim); keys are kept without positions."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    held: Tensor
    """bool (B, S): which slots have KV."""

    @classmethod
    def empty(cls, model: ChainModel, prompts: int, slots: int) -> Self:
        layers = (torch.zeros(prompts, model.heads, slots, model.head_dim),) * model.passes
        return cls(layers, layers, torch.zeros(prompts, slots, dtype=torch.bool))

    @classmethod
    def joined(cls, *parts: ReferenceKV) -> Self:
        """One after another."""
        keys = zip(*(part.keys for part in parts), strict=True)
        values = zip(*(part.values for part in parts), strict=True)
        held = torch.cat([part.held for part in parts], 1)
        return cls(tuple(torch.cat(each, 2) for each in keys), tuple(torch.cat(each, 2) for each in values), held)

    @property
    def slots(self) -> int:
        return int(self.held.shape[1])

    def part(self, start: int, end: int) -> Self:
        keys, values = (tuple(each[:, :, start:end] for each in side) for side in (self.keys, self.values))
        return type(self)(keys, values, self.held[:, start:end])


@dataclass(frozen=True, slots=True)
class Computed:
    """Normed hidden states (B, T, width) of new tokens, all KV, and each layer's attention (B, heads, T, S)."""

    hidden: Tensor
    kv: ReferenceKV
    attention: tuple[Tensor, ...]


def compute(
    model: ChainModel,
    tokens: Tensor,
    before: Tensor,
    slots: Tensor,
    kv: ReferenceKV,
) -> Computed:
    """New tokens (B, T), each after `before`, at `slots` of prompts with this KV, causal by position."""
    hidden, held = model.embed(tokens, before), kv.held.scatter(1, slots, True)
    spots = torch.arange(kv.slots)[None]
    hides = (spots[:, None] > slots[..., None]) | ~held[:, None]
    keys, values, attention = [], [], []
    for layer in range(model.passes):
        query, key, value = model.project(hidden)
        keys.append(_put(kv.keys[layer], slots, key))
        values.append(_put(kv.values[layer], slots, value))
        scores = rotate(query, slots) @ rotate(keys[-1], spots).transpose(-1, -2)
        weights = scores.masked_fill(hides[:, None], _HIDDEN).softmax(-1)
        attention.append(weights)
        hidden = model.finish(hidden, weights @ values[-1])
    return Computed(model.normed(hidden), ReferenceKV(tuple(keys), tuple(values), held), tuple(attention))


def compute_prompts(model: ChainModel, tokens: Tensor) -> Computed:
    """Whole prompts (B, T)."""
    slots = torch.arange(tokens.shape[1]).expand_as(tokens)
    return compute(model, tokens, previous(tokens), slots, ReferenceKV.empty(model, *tokens.shape))


def compute_behind(model: ChainModel, documents: Tensor, kv: ReferenceKV) -> Computed:
    """Documents (B, document tokens) after this KV; the result has theirs alone."""
    prompts, length = documents.shape
    room = ReferenceKV.joined(kv, ReferenceKV.empty(model, prompts, length))
    slots = torch.arange(kv.slots, room.slots).expand(prompts, -1)
    found = compute(model, documents, previous(documents), slots, room)
    return Computed(found.hidden, found.kv.part(kv.slots, room.slots), found.attention)


def system_prompt(model: ChainModel, prompts: int) -> ReferenceKV:
    """KV of what every prompt begins with."""
    return compute_prompts(model, torch.full((prompts, 1), BOS)).kv


def _put(states: Tensor, slots: Tensor, new: Tensor) -> Tensor:
    return states.scatter(2, slots[:, None, :, None].expand_as(new), new)
