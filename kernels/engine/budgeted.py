"""Engine within memory budgets: plan, placement and pressure."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig

from ragorder.kernels.cache import KnowledgeCache
from ragorder.kernels.engine.request import fault_of
from ragorder.kernels.engine.scheduler import Scheduler
from ragorder.kernels.engine.sequence import Sequence
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.model_sizes import quantised_words
from ragorder.kernels.models.loading import (
    ModelLoadError,
    check_loaded,
    first_line,
    load_config,
    loading,
    pick_device,
)
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.models.support import UnsupportedModelError, check_model, longest_exact_length
from ragorder.kernels.offload.checkpoint import Checkpoint, CheckpointError, LayerReadError
from ragorder.kernels.offload.layout import CheckpointMap
from ragorder.kernels.offload.model_memory import ModelMemory, decoder_layers, skeleton
from ragorder.kernels.offload.moves import LayerMove
from ragorder.kernels.offload.residency import LayerTiers
from ragorder.kernels.offload.store import LayerStore, Source
from ragorder.kernels.offload.stream import LayerStreamer
from ragorder.kernels.paging import KVShape, OutOfBlocksError
from ragorder.pipelining.placement.base import Placement, Workload
from ragorder.pipelining.placement.budgets import Budgets
from ragorder.pipelining.placement.costs import EstimatedCosts, Rates
from ragorder.pipelining.placement.fit import STAGES, place_pool
from ragorder.pipelining.placement.plan import plan_placement
from ragorder.trie.residency.base import TierLevel

_logger = logging.getLogger("ragorder.kernels.engine")

# Smallest step while other memory can be given back.
_LEAST_STEP = 64
# Steps without a shortage before pool and layers grow back by a part.
_STEPS_TO_GROW = 256
_WHOLE = "all layers are on the device: load the engine with device_bytes to move them"


@dataclass(frozen=True, slots=True)
class StreamedModel:
    model: Any
    streamer: LayerStreamer
    weights: ModelMemory


def _place(
    model: Any,
    settings: EngineSettings,
    weights: ModelMemory,
    *,
    gpu: bool,
    shape: KVShape | None = None,
    slot: int = 0,
) -> Placement:
    """Place by the planner of `ragorder doctor --memory`, around the settings that are given. Raises PlacementError."""
    assert settings.device_bytes is not None
    given = settings.model_fields_set
    sizes = weights.sizes(
        slot=slot,
        block_tokens=settings.block_size,
        longest=settings.max_model_len or longest_exact_length(model),
        staging=STAGES * max(slot, *weights.layers) if gpu else 0,
    )
    if shape is not None:
        sizes = sizes.model_copy(update={"kv_token": shape.block_bytes // shape.block_size})
    budgets = Budgets(settings.device_bytes, settings.host_bytes)
    held = "max_batch_tokens" in given
    if settings.device_tokens is not None:
        return place_pool(
            budgets,
            sizes,
            device_tokens=settings.device_tokens,
            batch=settings.max_requests,
            step_tokens=settings.max_batch_tokens,
            held=held,
        )
    costs = EstimatedCosts(
        sizes,
        Rates.usual(gpu=gpu),
        workload=Workload.usual(sizes.longest),
        step_tokens=settings.max_batch_tokens,
    )
    placed = plan_placement(budgets, costs, backlog=settings.max_requests, held=held)
    return placed.with_requests(settings.max_requests)


class StreamedMemory:
    """`placement` of an engine with streamed layers, and the settings derived from it. Raises PlacementError."""

    def __init__(self, model: PatchedModel, streamed: StreamedModel, settings: EngineSettings) -> None:
        self.streamer = streamer = streamed.streamer
        self.weights = streamed.weights
        self.placement = placed = _place(
            model.model,
            settings,
            self.weights,
            gpu=model.device.type == "cuda",
            shape=model.shape,
            slot=streamer.store.slot_bytes,
        )
        self._blocks = placed.kv.device // model.shape.block_bytes
        self.settings = settings.model_copy(
            update={
                "device_tokens": self._blocks * settings.block_size,
                "host_bytes": placed.kv.host,
                "max_batch_tokens": placed.step_tokens,
                "max_requests": placed.batch,
            }
        )

    def make_cache(self, make: Callable[[int, int, abc.Sequence[int]], KnowledgeCache]) -> KnowledgeCache:
        blocks, host_bytes = self._blocks, self.settings.host_bytes
        layers, kv_in_host = len(self.weights.layers), self.placement.kv_host_layers
        in_host = LayerTiers.spread(layers, layers - kv_in_host, kv_in_host).in_host
        while True:
            try:
                return make(blocks, host_bytes, in_host)
            except (MemoryError, RuntimeError) as error:
                if fault_of(error) != "memory":
                    raise
                if self.streamer.shed():
                    _logger.warning("no memory for %d KV blocks beside the planned layers: evicting layers", blocks)
                elif blocks == 1:
                    raise
                else:
                    _logger.warning("no memory for %d KV blocks: trying half of them", blocks)
                    blocks, host_bytes = (blocks + 1) // 2, host_bytes // 2

    def place_layers(self) -> None:
        placed, streamer = self.placement, self.streamer
        if placed.slots:
            streamer.resize(placed.slots)
        weights = placed.weights
        reached = streamer.move(LayerTiers.spread(weights.total, weights.device, weights.host))
        if reached.count(TierLevel.DEVICE) < weights.device:
            _logger.warning(
                "only %d of the %d layers within the budget fit into memory: the others stream",
                reached.count(TierLevel.DEVICE),
                weights.device,
            )
        elif placed.slots:
            streamer.room = self.room(placed.slots, placed.step_tokens, placed.batch)

    def room(self, slots: int, step_tokens: int, requests: int) -> Callable[[int], int]:
        """Return the bytes for slots by a step's tokens: unused workspace holds layers read ahead (RAGDoll 4.3)."""
        workspace, least = self.weights.workspace, slots * self.streamer.store.slot_bytes

        def room(tokens: int) -> int:
            return least + workspace(step_tokens, requests) - workspace(min(tokens, step_tokens), requests)

        return room


class MemoryPressure:
    """Gives memory back between steps (RAGDoll 4.2): smaller steps, a smaller pool with KV moved down a tier, then
    layers. After many steps without a shortage they grow back."""

    def __init__(self, scheduler: Scheduler, cache: KnowledgeCache, memory: StreamedMemory | None) -> None:
        self._scheduler = scheduler
        self._cache = cache
        self._memory = memory
        self._streamer = streamer = None if memory is None else memory.streamer
        # The planned sizes.
        self._blocks = cache.pool.blocks
        self._residency = None if streamer is None else streamer.residency
        self._calm = 0

    def shrink(self, tokens: int, unfinished: Collection[Sequence], *, failed: bool) -> bool:
        """Give memory back after a step of `tokens` tokens; the pool still fits each `unfinished` request. A `failed`
        step's blocks are useless. Return False if nothing is left to give."""
        self._calm = 0
        if failed:
            self._scheduler.requeue()
        if self._streamer is None:
            return self._scheduler.shrink(tokens)
        if min(tokens, self._scheduler.step_tokens) > _LEAST_STEP and self._scheduler.shrink(tokens):
            return True
        given = self._shrink_pool(unfinished) or self._streamer.shed() or self._scheduler.shrink(tokens)
        # The pool may have found no memory for its smaller size: it gets what was given back.
        return self.fit(_needed_tokens(unfinished)) and given

    def fit(self, tokens: int) -> bool:
        blocks = self._cache.shape.blocks_for(tokens)
        while self._cache.pool.blocks < min(blocks, self._blocks):
            try:
                self._cache.resize(device_blocks=min(blocks, self._blocks))
            except MemoryError:
                if self._streamer is None or not self._streamer.shed():
                    return False
        return True

    def restore_pool(self, unfinished: Collection[Sequence]) -> None:
        if self._cache.pool.blocks < self._blocks and not self.fit(_needed_tokens(unfinished)):
            raise MemoryError("not enough memory for the KV of a request")

    def hold(self, tokens: int) -> bool:
        """Fit a request, evicting layers if it needs more than the planned pool."""
        while self.fit(tokens) and self._cache.pool.blocks < self._cache.shape.blocks_for(tokens):
            if not self.make_blocks():
                return False
        return self._cache.pool.blocks >= self._cache.shape.blocks_for(tokens)

    def step_succeeded(self, unfinished: Collection[Sequence]) -> None:
        if self._streamer is None or self._residency is None:
            return
        self._calm += 1
        if self._calm < _STEPS_TO_GROW:
            return
        self._calm = 0
        blocks = self._cache.pool.blocks
        # Not needed now; a failed device also fails in the next step.
        with suppress(MemoryError, RuntimeError, LayerReadError):
            if blocks > self._blocks:
                # Layers have made way for a request.
                if self._cache.shape.blocks_for(_needed_tokens(unfinished)) <= self._blocks:
                    self._forget_tables()
                    self._cache.resize(device_blocks=self._blocks)
            elif blocks == self._blocks:
                self._streamer.regain(self._residency)
            else:
                self._cache.resize(device_blocks=min(max(1, 2 * blocks), self._blocks))

    def make_blocks(self) -> bool:
        """Evict layers for a request. Return False without layers or memory."""
        if self._streamer is None:
            return False
        before = self._streamer.held_bytes
        if not self._streamer.shed():
            return False
        # The first streamed layer's buffers may take more than the layer did.
        more = max(0, before - self._streamer.held_bytes) // self._cache.shape.block_bytes
        try:
            self._cache.resize(device_blocks=self._cache.pool.blocks + more)
        except MemoryError:
            return False
        return True

    @property
    def residency(self) -> LayerTiers:
        """The layers' tiers now. Raises ValueError without a streamer."""
        if self._streamer is None:
            raise ValueError(_WHOLE)
        return self._streamer.residency

    def begin_move(self, residency: LayerTiers) -> None:
        """Begin to move layers; after a shortage they return there. Raises ValueError without a streamer."""
        if self._streamer is None:
            raise ValueError(_WHOLE)
        self._streamer.begin_move(residency)
        self._residency = self._streamer.residency

    def next_move(self, residency: LayerTiers) -> LayerMove | None:
        """Return `LayerStreamer.next_move`. Raises MemoryError if a shortage has ended the move."""
        assert self._streamer is not None
        if not self._streamer.moves_to(residency):
            raise MemoryError("memory ran short while layers moved: they stay where they are now")
        try:
            return self._streamer.next_move(residency)
        finally:
            self._residency = self._streamer.residency

    def end_move(self) -> None:
        assert self._streamer is not None
        self._streamer.end_move()

    def kv_moves(self, in_host: int) -> tuple[list[int], bool]:
        """Return the layers whose KV must move for `in_host` layers' KV in host memory, and whether it leaves the
        device."""
        layers, now = self._cache.shape.layers, self._cache.layers_in_host
        wanted = LayerTiers.of_host(layers, now).with_counts(layers - in_host, in_host).in_host
        return sorted({*now} ^ {*wanted}), in_host > len(now)

    def move_kv(self, layer: int) -> None:
        """Move a layer's KV to the other place between two steps. Raises MemoryError."""
        self._cache.move_layer(layer, to_host=layer not in self._cache.layers_in_host)

    def begin_place(self, placement: Placement, residency: LayerTiers, unfinished: Collection[Sequence]) -> None:
        """Reduce what becomes smaller, and begin to move layers. Raises OutOfBlocksError, changing nothing, if requests
        need the KV that the placement takes."""
        assert self._streamer is not None
        scheduler, pool = self._scheduler, self._cache.pool
        host_bytes = self._cache.stats().host.capacity_bytes
        device_bytes = min(placement.kv.device, pool.blocks * self._cache.shape.block_bytes)
        self._resize_to(device_bytes, min(placement.kv.host, host_bytes), unfinished)
        scheduler.limit(min(placement.step_tokens, scheduler.step_tokens), min(placement.batch, scheduler.max_requests))
        self.begin_move(residency)
        if placement.slots:
            self._streamer.resize(placement.slots)

    def finish_place(self, placement: Placement, unfinished: Collection[Sequence]) -> None:
        """Increase what becomes larger, once layers have moved."""
        assert self._streamer is not None and self._memory is not None
        self._scheduler.limit(placement.step_tokens, placement.batch)
        room = self._memory.room(placement.slots, placement.step_tokens, placement.batch)
        self._streamer.room = room if placement.slots else None
        self._resize_to(placement.kv.device, placement.kv.host, unfinished)

    def _resize_to(self, device_bytes: int, host_bytes: int, unfinished: Collection[Sequence]) -> None:
        cache, shape = self._cache.stats(), self._cache.shape
        blocks, host_blocks = device_bytes // shape.block_bytes, host_bytes // shape.block_bytes
        self.resize(
            blocks * shape.block_size if blocks != self._cache.pool.blocks else None,
            host_bytes if host_blocks * shape.block_bytes != cache.host.capacity_bytes else None,
            unfinished,
        )

    def resize(self, device_tokens: int | None, host_bytes: int | None, unfinished: Collection[Sequence]) -> None:
        shape, needed = self._cache.shape, _needed_tokens(unfinished)
        if device_tokens is not None and device_tokens < shape.block_size:
            raise ValueError(f"device_tokens is {device_tokens}: give {shape.block_size} (one block) or more")
        if host_bytes is not None and host_bytes < 0:
            raise ValueError(f"host_bytes is {host_bytes}: give 0 or more")
        blocks = None if device_tokens is None else device_tokens // shape.block_size
        if blocks is not None and blocks < shape.blocks_for(needed):
            raise OutOfBlocksError(f"device_tokens is {device_tokens}, but a request needs {needed}: wait for its end")
        self._forget_tables()
        before = self._cache.pool.blocks
        self._cache.resize(device_blocks=blocks)
        if host_bytes is not None:
            try:
                self._cache.resize(host_blocks=host_bytes // shape.block_bytes)
            except (OutOfBlocksError, MemoryError):
                # Without memory for this either, the pool grows for the next request that needs more. One that had lost
                # all its blocks keeps the new ones.
                if before:
                    with suppress(MemoryError):
                        self._cache.resize(device_blocks=before)
                raise
        if blocks is not None:
            self._blocks = blocks

    def _shrink_pool(self, unfinished: Collection[Sequence]) -> bool:
        pool = self._cache.pool
        blocks = max(1, self._cache.shape.blocks_for(_needed_tokens(unfinished)), pool.blocks // 2)
        if blocks >= pool.blocks:
            return False
        _logger.warning("memory is short: the KV pool shrinks from %d blocks to %d", pool.blocks, blocks)
        self._forget_tables()
        try:
            self._cache.resize(device_blocks=blocks)
        except (OutOfBlocksError, MemoryError):
            # Requests wait again, and find their KV on other tiers.
            self._scheduler.requeue()
            try:
                self._cache.replace_device(blocks)
            except MemoryError:
                return False
        return True

    def _forget_tables(self) -> None:
        # Resizing renumbers blocks.
        turns = self._scheduler.with_turns
        if any(sequence.selecting is not None for sequence in turns):
            self._scheduler.requeue()
        for sequence in turns:
            sequence.forget_table()


def _needed_tokens(unfinished: Collection[Sequence]) -> int:
    return max((each.prompt_tokens + each.request.sampling.max_tokens for each in unfinished), default=1)


_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def load_streamed(
    name: str | Path, settings: EngineSettings, *, source: Callable[[Checkpoint], Source] | None = None
) -> StreamedModel:
    """Load a model with only the weights outside its decoder layers in memory. `source` replaces the checkpoint as the
    layers' reader. Raises PlacementError before reading anything, ModelLoadError, UnsupportedModelError."""
    device = pick_device(settings.device)
    config = load_config(name)
    _check_quantised(name, config)
    try:
        checkpoint = Checkpoint(model_folder(name))
    except CheckpointError as error:
        raise ModelLoadError(str(error)) from error
    try:
        return _load(name, config, checkpoint, settings, device, checkpoint if source is None else source(checkpoint))
    except (CheckpointError, LayerReadError) as error:
        checkpoint.close()
        raise ModelLoadError(f"{name}: {error}") from error
    except BaseException:
        checkpoint.close()
        raise


def _load(
    name: str | Path,
    config: Any,
    checkpoint: Checkpoint,
    settings: EngineSettings,
    device: torch.device,
    source: Source,
) -> StreamedModel:
    dtype = _dtype_of(config, checkpoint, settings)
    empty = skeleton(config, dtype)
    check_model(empty)
    size = ModelMemory.of(config, dtype)
    _place(empty, settings, size, gpu=device.type == "cuda")
    prefix, layers = decoder_layers(empty)
    found = CheckpointMap(empty, prefix, layers, checkpoint)
    weights = {each: checkpoint.tensor(each) for each in found.rest}
    for number, layer in enumerate(layers):
        # Without memory: the streamer supplies the weights.
        weights |= {
            f"{prefix}.{number}.{each}": torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            for each, parameter in layer.named_parameters()
        }
    kind = type(empty)
    del empty, layers
    try:
        with loading():
            model, report = kind.from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
            )
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ModelLoadError(f"{name} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    check_loaded(name, report)
    model.config._name_or_path = model.name_or_path = str(name)
    _load_generation(model, name)
    _, layers = decoder_layers(model)
    streamer = LayerStreamer(layers, LayerStore.of(checkpoint, found, layers, source), device)
    try:
        return StreamedModel(model.to(device), streamer, size)
    except BaseException:
        streamer.close()
        raise


def model_folder(name: str | Path) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_WEIGHTS)))
    except Exception as error:
        raise ModelLoadError(f"{name}: its weights cannot be downloaded from the Hub: {first_line(error)}") from error


def _check_quantised(name: str | Path, config: Any) -> None:
    if words := quantised_words(config.to_dict()):
        raise UnsupportedModelError(
            f"{name}: {words}. Or leave out device_bytes, or give the model before quantisation"
        )


def _dtype_of(config: Any, checkpoint: Checkpoint, settings: EngineSettings) -> torch.dtype:
    named = settings.dtype or getattr(config, "dtype", None)
    if isinstance(named, str):
        return getattr(torch, named.removeprefix("torch."))
    if named is not None:
        return named
    floating = (entry.dtype for entry in checkpoint.entries.values() if entry.dtype.is_floating_point)
    return next(floating, torch.float32)


def _load_generation(model: Any, name: str | Path) -> None:
    try:
        model.generation_config = GenerationConfig.from_pretrained(name)
    except OSError:
        # The one made from the configuration stays.
        return
