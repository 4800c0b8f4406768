"""Paged attention for transformers' models, by AttentionInterface.

No model is patched: the step is passed in keyword arguments and replaces the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from ragorder.kernels.attention import PackedBatch, prefix_attention, sparse_attention
from ragorder.kernels.models.support import UnsupportedModelError
from ragorder.kernels.paging import BlockPool

__all__ = ["IMPLEMENTATION", "STEP", "PagedLayers", "PagedStep", "ScatteredRows", "StepAttention", "register"]

IMPLEMENTATION = "ragorder"
STEP = "ragorder_step"

# Arguments of models to their attention that do not change its result: transformers' cache and masks are not used, and
# keys already include positions.
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


class StepAttention(Protocol):
    """Attention of one step, layer by layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """query (T, HQ, D), key and value (T, HKV, D) of the new tokens, rotated; returns (T, HQ, D)."""
        ...


class PagedLayers:
    """Current views of a pool, per layer."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.block_size = pool.shape.block_size
        self.block_rows = 2 * pool.shape.layers * pool.shape.block_size

    @property
    def key_rows(self) -> list[torch.Tensor]:
        return self._pool.views.key_rows

    @property
    def value_rows(self) -> list[torch.Tensor]:
        return self._pool.views.value_rows

    @property
    def key_caches(self) -> list[torch.Tensor]:
        return self._pool.views.key_caches

    @property
    def value_caches(self) -> list[torch.Tensor]:
        return self._pool.views.value_caches


@dataclass(frozen=True, slots=True, eq=False)
class ScatteredRows:
    """A step's last rows, at `positions` int32 (N,) of the requests of `batch`, whose contexts include them."""

    batch: PackedBatch
    positions: torch.Tensor


class PagedStep:
    """`slots` int64 (T,): block * `PagedLayers.block_rows` + offset of each new token. Rows after those of `batch` are
    `scattered`."""

    def __init__(
        self, layers: PagedLayers, batch: PackedBatch, slots: torch.Tensor, scattered: ScatteredRows | None = None
    ) -> None:
        self._layers = layers
        self._batch = batch
        self._slots = slots
        self.scattered = scattered

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        layers = self._layers
        # Write all new tokens before any sequence reads the pool: one may begin with nodes that another computes.
        layers.key_rows[layer].index_copy_(0, self._slots, key)
        layers.value_rows[layer].index_copy_(0, self._slots, value)
        caches = layers.key_caches[layer], layers.value_caches[layer]
        scattered = self.scattered
        rows = len(query) if scattered is None else len(query) - len(scattered.positions)
        parts: list[torch.Tensor] = []
        if rows:
            own = (query, key, value) if scattered is None else (query[:rows], key[:rows], value[:rows])
            parts.append(prefix_attention(*own, *caches, self._batch, scale=scale, window=window, softcap=softcap))
        if scattered is not None:
            # Models with a window have no such rows.
            found = sparse_attention(
                query[rows:], *caches, scattered.batch, scattered.positions, scale=scale, softcap=softcap
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
    """query (1, HQ, T, D), key and value (1, HKV, T, D); returns (1, T, HQ, D).

    Raises UnsupportedModelError for arguments that it would have to ignore.
    """
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
    out = step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out[None], None


def _is_empty(given: object) -> bool:
    return given is None or given is False or (isinstance(given, Sequence) and not given)


def register() -> None:
    AttentionInterface.register(IMPLEMENTATION, _attention)
