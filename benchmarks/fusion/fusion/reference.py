"""Reuse of documents' KV on the chain model, in plain torch: what the embedded engine is compared with.

Keys are kept without positions, so they stand wherever they are put.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from ragorder.benchmarks.fusion.fusion.model import ChainModel, previous, rotate
from ragorder.benchmarks.fusion.fusion.task import BOS

__all__ = ["Computed", "ReferenceKV", "compute", "compute_behind", "compute_prompts", "system_prompt"]

_HIDDEN = -1e9


@dataclass(frozen=True, slots=True)
class ReferenceKV:
    """KV of B prompts with S slots each: per layer (B, heads, S, head_dim)."""

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
    """New tokens (B, T), each behind `before`, at `slots` of prompts with this KV, causal by position."""
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
    """Documents (B, document tokens) behind this KV; the result has theirs alone."""
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
