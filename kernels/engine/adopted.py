"""A model in the engine's hands."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ragorder.kernels.engine.attention import IMPLEMENTATION, register
from ragorder.kernels.engine.forward import Forward
from ragorder.kernels.engine.loading import pick_device
from ragorder.kernels.engine.probe import observe, verify
from ragorder.kernels.engine.support import check_model, longest_exact_length
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.paging import KVShape

__all__ = ["AdoptedModel"]


# How many engines each model is with, and what its attention and mode were before the first.
_held: WeakKeyDictionary[Any, tuple[int, str, bool]] = WeakKeyDictionary()
_lock = Lock()


class AdoptedModel:
    """A model whose attention is ours until the last engine that it is with has given it back. `longest` is how many
    tokens of prompt and answer it takes, None where nothing says; `shape` what the KV of its tokens looks like.

    Raises UnsupportedModelError, and leaves its attention as it was, if the model cannot be served exactly; ValueError
    for a device or a length that cannot be.
    """

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        check_model(model)
        self.model = model
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        if settings.device is not None:
            model.to(pick_device(settings.device))
        if settings.dtype is not None:
            model.to(getattr(torch, settings.dtype))
        self.device = pick_device(str(model.device))
        self.longest = self._longest(settings.max_model_len)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.forward = Forward(model)
        register()
        self._take()
        try:
            facts = observe(model, self.forward)
            if settings.verify:
                verify(model, self.forward, facts, settings.block_size, self.longest)
        except BaseException:
            self.give_back()
            raise
        self.shape = KVShape(facts.layers, facts.kv_heads, facts.head_dim, settings.block_size, facts.dtype)

    def end_tokens(self, tokenizer: Any | None) -> frozenset[int]:
        """The tokens with which the model ends a text: one, several or none."""
        ends: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for told in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
            ends.update([told] if isinstance(told, int) else told or ())
        return frozenset(ends)

    def give_back(self) -> None:
        """The attention and the mode are what they were, unless another engine has the model, too."""
        with _lock:
            engines, implementation, training = _held.pop(self.model)
            if engines > 1:
                _held[self.model] = (engines - 1, implementation, training)
                return
            self.model.set_attn_implementation(implementation)
            self.model.train(training)

    def _take(self) -> None:
        with _lock:
            model = self.model
            engines, implementation, training = _held.get(model, (0, model.config._attn_implementation, model.training))
            _held[model] = (engines + 1, implementation, training)
            model.set_attn_implementation(IMPLEMENTATION)
            model.eval()

    def _longest(self, wanted: int | None) -> int | None:
        exact = longest_exact_length(self.model)
        if wanted and exact and wanted > exact:
            raise ValueError(
                f"max_model_len is {wanted}, and {self.name} is exact up to {exact} tokens: give less, or none"
            )
        return wanted or exact
