"""Models patched for the engine, and the size of their KV pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ragorder.kernels.cache import DiskSettings, KnowledgeCache
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.models.attention import IMPLEMENTATION, register
from ragorder.kernels.models.batch import Forward
from ragorder.kernels.models.identity import identity
from ragorder.kernels.models.loading import pick_device
from ragorder.kernels.models.probe import observe, verify
from ragorder.kernels.models.support import check_model, longest_exact_length
from ragorder.kernels.offload.model_memory import decoder_layers
from ragorder.kernels.offload.stream import LayerStreamer
from ragorder.kernels.paging import KVShape
from ragorder.trie.profile import PrefillProfile

__all__ = ["PatchedModel", "cache_maker", "device_blocks", "wanted_tokens"]

_CPU_PROMPTS = 4
_CPU_SHARE = 0.25
# For models without a maximum length.
_CPU_TOKENS = 32768

# Per model: its engines, and its attention and mode before the first.
_held: WeakKeyDictionary[Any, tuple[int, str, bool]] = WeakKeyDictionary()
_lock = Lock()


class PatchedModel:
    """A model with the engine's attention until its last engine calls `restore`. Raises UnsupportedModelError."""

    def __init__(self, model: Any, settings: EngineSettings, streamer: LayerStreamer | None = None) -> None:
        check_model(model)
        self.model = model
        self.name = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
        # Streamed weights already have a device and a dtype.
        if settings.device is not None and streamer is None:
            model.to(pick_device(settings.device))
        if settings.dtype is not None and streamer is None:
            _cast(model, getattr(torch, settings.dtype))
        self.device = pick_device(str(model.device))
        self.longest = self._longest(settings.max_model_len)
        self.vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self.forward = Forward(model, streamer)
        register()
        self._patch()
        try:
            observed = observe(model, self.forward)
            if settings.verify:
                verify(model, self.forward, observed, settings.block_size, self.longest)
        except BaseException:
            self.restore()
            raise
        self.shape = KVShape(observed.layers, observed.kv_heads, observed.head_dim, settings.block_size, observed.dtype)

    def end_tokens(self, tokenizer: Any | None) -> frozenset[int]:
        ends: set[int] = set()
        generation = getattr(self.model, "generation_config", None)
        for ids in (getattr(generation, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
            ends.update([ids] if isinstance(ids, int) else ids or ())
        return frozenset(ends)

    def restore(self) -> None:
        with _lock:
            engines, implementation, training = _held.pop(self.model)
            if engines > 1:
                _held[self.model] = (engines - 1, implementation, training)
                return
            self.model.set_attn_implementation(implementation)
            self.model.train(training)

    def _patch(self) -> None:
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
                f"max_model_len is {wanted}, but {self.name} is exact only up to {exact} tokens: give less, or none"
            )
        return wanted or exact


def wanted_tokens(longest: int | None) -> int:
    return _CPU_PROMPTS * (longest or _CPU_TOKENS)


def device_blocks(
    shape: KVShape, device: torch.device, device_tokens: int | None, longest: int | None, gpu_share: float
) -> int:
    """Return `device_tokens`' blocks, else a share of a GPU's free memory, or on a CPU four longest prompts."""
    if device_tokens is not None:
        return max(1, device_tokens // shape.block_size)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        blocks = int(free * gpu_share) // shape.block_bytes
        room = f"{gpu_share:.0%} of the {free} free bytes of {device}"
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        wanted = shape.blocks_for(wanted_tokens(longest))
        blocks = min(wanted, int(memory * _CPU_SHARE) // shape.block_bytes)
        room = f"{_CPU_SHARE:.0%} of the {memory} bytes of memory"
    if blocks < 1:
        raise ValueError(
            f"{room} cannot hold a KV block of {shape.block_bytes} bytes: give device_tokens, a smaller block_size, or "
            "a smaller model"
        )
    return blocks


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Cast as if loaded in this dtype: values outside weight files, such as rotary frequencies, keep their dtype."""
    if model.dtype == dtype:
        return
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def cache_maker(
    model: PatchedModel, settings: EngineSettings, profile: PrefillProfile, streamer: LayerStreamer | None
) -> Callable[[int, int], KnowledgeCache]:
    # Reads all weights, so only for KV that outlives the process.
    name = "" if settings.disk_path is None else _identity(model, streamer)
    shape = model.shape

    disk = None
    if settings.disk_path is not None:
        disk = DiskSettings(settings.disk_path, settings.disk_bytes, backlog_bytes=settings.disk_backlog_bytes)

    def make(device_blocks: int, host_bytes: int) -> KnowledgeCache:
        return KnowledgeCache(
            shape,
            device_blocks=device_blocks,
            host_blocks=host_bytes // shape.block_bytes,
            disk=disk,
            policy=settings.policy,
            history=settings.history,
            profile=profile,
            device=model.device,
            identity=name,
            replicate_nodes=settings.replicate_nodes,
        )

    return make


def _identity(model: PatchedModel, streamer: LayerStreamer | None) -> str:
    if streamer is None:
        return identity(model.model, model.shape)
    prefix, _ = decoder_layers(model.model)
    return identity(model.model, model.shape, dict(streamer.store.parameters(prefix)))
