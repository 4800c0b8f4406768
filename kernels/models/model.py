"""Models probed and patched for the engine."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ragorder.kernels.cache import DiskSettings, KnowledgeCache
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.models.attention import IMPLEMENTATION, AttentionCall, register
from ragorder.kernels.models.batch import Forward, Piece, pack
from ragorder.kernels.models.identity import identity
from ragorder.kernels.models.loading import pick_device
from ragorder.kernels.models.support import UnsupportedModelError, check_model, longest_exact_length, text_config
from ragorder.kernels.offload.model_memory import decoder_layers
from ragorder.kernels.offload.stream import LayerStreamer
from ragorder.kernels.paging import BlockPool, KVShape
from ragorder.trie.profile import PrefillProfile

_logger = logging.getLogger("ragorder.kernels.engine")

# Relative difference of the logits' norms: far below that of wrong masks or positions, far above rounding.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


class _Observer:
    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int, int, torch.dtype]] = {}
        self.windows: dict[int, int | None] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        layer, query, key, value, scale, window, _ = call
        if layer in self.shapes:
            raise UnsupportedModelError(f"layer {layer} attends more than once in a forward")
        self.shapes[layer] = (query.shape[1], key.shape[1], key.shape[2], value.shape[2], key.dtype)
        self.windows[layer] = window
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        attend: Callable[..., torch.Tensor] = torch.nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def observe(model: Any, forward: Forward, block_size: int) -> KVShape:
    """Run two tokens for the shape of KV. Raises UnsupportedModelError if layers differ, do not attend, or contradict
    the configured windows."""
    name = type(model).__name__
    observer = _Observer()
    ids = _tokens(model, 2)
    try:
        forward(ids, torch.arange(2, device=ids.device), torch.tensor([1], device=ids.device), observer)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{name} cannot be served exactly: {error}") from error
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} cannot be served: its forward does not take a packed step ({type(error).__name__}: {error})"
        ) from error
    config = text_config(model)
    wanted = getattr(config, "num_hidden_layers", len(observer.shapes))
    if sorted(observer.shapes) != list(range(wanted)):
        raise UnsupportedModelError(
            f"{name} cannot be served exactly: {len(observer.shapes)} of its {wanted} layers attend through "
            "transformers' AttentionInterface, so the others keep a state outside the engine"
        )
    shapes = set(observer.shapes.values())
    if len(shapes) > 1:
        raise UnsupportedModelError(f"{name} cannot be served: the shapes of heads differ between its layers")
    _, kv_heads, head_dim, value_dim, dtype = shapes.pop()
    if head_dim != value_dim:
        raise UnsupportedModelError(
            f"{name} cannot be served: its keys have {head_dim} dimensions a head, its values {value_dim}"
        )
    if dtype not in _TOLERANCE:
        raise UnsupportedModelError(f"{name} cannot be served: KV of {dtype}; load it as float32, bfloat16 or float16")
    _check_windows(name, config, observer.windows)
    return KVShape(wanted, kv_heads, head_dim, block_size, dtype)


def _check_windows(name: str, config: Any, windows: dict[int, int | None]) -> None:
    # transformers passes windows in masks, which are not used here, and to the attention.
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    for layer, told in windows.items():
        sliding = types[layer] == "sliding_attention" if types else window is not None
        if told != (window if sliding else None):
            raise UnsupportedModelError(
                f"{name} cannot be served exactly: layer {layer} uses a window of {told} tokens, but its "
                f"configuration has {window if sliding else None}"
            )


def verify(model: Any, forward: Forward, shape: KVShape, longest: int | None) -> None:
    """Compare with eager attention, on a prompt split inside a block. Raises UnsupportedModelError."""
    block_size, tolerance = shape.block_size, _TOLERANCE[shape.dtype]
    length = min(2 * block_size + block_size // 2 + 3, 96, longest or 96)
    first = max(1, length - block_size // 2 - 2)
    ids = _tokens(model, length)
    blocks = shape.blocks_for(length)
    pool = BlockPool(shape, blocks, ids.device)
    table = pool.allocate(blocks)
    numbers = ids.tolist()
    for start, end in ((0, first), (first, length)):
        if start == end:
            continue
        ours = forward(*pack([Piece(numbers[start:end], start, table, True)], pool))
    pool.release(table)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            eager = model(input_ids=ids[None], use_cache=False).logits[0, -1:]
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    eager = eager.float()
    difference = ((ours.float() - eager).norm() / eager.norm().clamp_min(1e-12)).item()
    _logger.debug("%s: the engine's logits differ from eager attention's by %.2e", type(model).__name__, difference)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be served exactly: over a cached prefix the logits differ from those of "
            f"transformers' eager attention by {difference:.1e} of their norm (allowed: {tolerance:g})"
        )


def _tokens(model: Any, count: int) -> torch.Tensor:
    embedding = model.get_input_embeddings().weight
    drawn = torch.randint(0, embedding.shape[0], (count,), generator=torch.Generator().manual_seed(count))
    return drawn.to(embedding.device)


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
            self.shape = observe(model, self.forward, settings.block_size)
            if settings.verify:
                verify(model, self.forward, self.shape, self.longest)
        except BaseException:
            self.restore()
            raise

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
    """Return the blocks of `device_tokens`, else of a share of free GPU memory, or of four longest prompts."""
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
    """Cast as if loaded so: what is not in weight files, such as rotary frequencies, keeps its dtype."""
    if model.dtype == dtype:
        return
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def cache_maker(
    model: PatchedModel, settings: EngineSettings, profile: PrefillProfile, streamer: LayerStreamer | None
) -> Callable[[int, int, Sequence[int]], KnowledgeCache]:
    shape, name = model.shape, ""
    disk: DiskSettings | None = None
    if settings.disk_path is not None:
        disk = DiskSettings(settings.disk_path, settings.disk_bytes, backlog_bytes=settings.disk_backlog_bytes)
        # Reads all weights, so only for KV that outlives the process.
        name = _identity(model, streamer)

    def make(device_blocks: int, host_bytes: int, layers_in_host: Sequence[int] = ()) -> KnowledgeCache:
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
            layers_in_host=None if streamer is None else layers_in_host,
        )

    return make


def _identity(model: PatchedModel, streamer: LayerStreamer | None) -> str:
    if streamer is None:
        return identity(model.model, model.shape)
    prefix, _ = decoder_layers(model.model)
    return identity(model.model, model.shape, dict(streamer.store.parameters(prefix)))
