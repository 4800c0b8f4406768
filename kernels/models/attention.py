"""Paged attention for transformers' models, by AttentionInterface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from ragorder.kernels.attention import PackedBatch, prefix_attention, sparse_attention
from ragorder.kernels.attention.runs import Runs
from ragorder.kernels.models.support import UnsupportedModelError
from ragorder.kernels.paging import BlockPool, StepBlocks
from ragorder.kernels.paging.places import Turn

IMPLEMENTATION = "ragorder"
STEP = "ragorder_step"

# Arguments without effect here: transformers' cache and masks are not used, and keys already include positions.
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionCall(NamedTuple):
    """One layer's attention for a step's T new tokens, whose vectors are rotated."""

    layer: int
    query: torch.Tensor
    """(T, HQ, D)"""
    key: torch.Tensor
    """(T, HKV, D)"""
    value: torch.Tensor
    scale: float | None
    window: int | None
    softcap: float | None


class StepAttention(Protocol):
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return (T, HQ, D)."""


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredRows:
    """A step's last N rows, at `positions` int32 (N,) of `batch`'s requests, whose contexts include them. `turn`
    rotates the queries for `runs` of keys."""

    batch: PackedBatch
    positions: torch.Tensor
    runs: Runs
    turn: Turn | None


class PagedStep:
    """`slots` int64 (S,), block * `BlockPool.block_rows` + offset, get the KV of the tokens `written` int64 (S,), by
    default of all in order. The last rows are `scattered`. `blocks` are given for a pool that copies them."""

    def __init__(
        self,
        pool: BlockPool,
        batch: PackedBatch,
        slots: torch.Tensor,
        scattered: ScatteredRows | None = None,
        written: torch.Tensor | None = None,
        blocks: StepBlocks | None = None,
    ) -> None:
        self._pool = pool
        self._batch = batch
        self._slots = slots
        self._written = written
        self._blocks = blocks
        self.scattered = scattered

    def attend(self, call: AttentionCall) -> torch.Tensor:
        with self._pool.supplied(call.layer, self._blocks):
            return self._attend(call)

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, scale, window, softcap = call
        views, scattered = self._pool.views, self.scattered
        # Write all new tokens before any sequence reads the pool: one may begin with nodes that another computes.
        kept_key, kept_value = (key, value) if self._written is None else (key[self._written], value[self._written])
        views.key_rows[layer].index_copy_(0, self._slots, kept_key)
        views.value_rows[layer].index_copy_(0, self._slots, kept_value)
        caches = views.key_caches[layer], views.value_caches[layer]
        rows = len(query) if scattered is None else len(query) - len(scattered.positions)
        parts: list[torch.Tensor] = []
        if rows:
            own = (query, key, value) if scattered is None else (query[:rows], key[:rows], value[:rows])
            parts.append(prefix_attention(*own, *caches, self._batch, scale=scale, window=window, softcap=softcap))
        if scattered is not None:
            # Models with a window have no such rows.
            found = sparse_attention(
                query[rows:],
                views.key_rows[layer].unsqueeze(1),
                views.value_rows[layer].unsqueeze(1),
                scattered.batch,
                scattered.positions,
                scale=scale,
                softcap=softcap,
                runs=scattered.runs,
                turn=None if scattered.turn is None else scattered.turn.queries(layer, query.shape[2]),
            )
            parts.append(found)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query (1, HQ, T, D), key and value (1, HKV, T, D); returns (1, T, HQ, D)."""
    step: StepAttention | None = others.pop(STEP, None)
    if step is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without {STEP}: the model does not pass keyword arguments on to its "
            f"attention, or was called outside the engine (see TieredEngine.close)"
        )
    effects = [name for name, given in others.items() if name not in _WITHOUT_EFFECT and not _is_empty(given)]
    if attention_mask is not None:
        effects.append("attention_mask")
    if dropout:
        effects.append("dropout")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        effects.append("is_causal=False")
    if effects:
        raise UnsupportedModelError(
            f"{type(module).__name__} needs attention that the embedded engine cannot compute exactly: "
            f"{', '.join(sorted(effects))}"
        )
    if query.shape[0] != 1:
        raise UnsupportedModelError(f"{type(module).__name__} splits a packed step into {query.shape[0]} rows")
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    out = step.attend(AttentionCall(module.layer_idx, q, k, v, scaling, sliding_window, softcap))
    return out[None], None


def _is_empty(given: object) -> bool:
    return given is None or given is False or (isinstance(given, Sequence) and not given)


def register() -> None:
    AttentionInterface.register(IMPLEMENTATION, _attention)
