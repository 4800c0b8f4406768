"""Cache of an engine, by its settings."""

from __future__ import annotations

from collections.abc import Callable

from ragorder.kernels.cache import DiskSettings, KnowledgeCache
from ragorder.kernels.engine.identity import identity
from ragorder.kernels.engine.model import PatchedModel
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.offload.footprint import decoder_layers
from ragorder.kernels.offload.stream import LayerStreamer
from ragorder.kernels.profile import PrefillProfile

__all__ = ["cache_maker"]


def cache_maker(
    model: PatchedModel, settings: EngineSettings, profile: PrefillProfile, streamer: LayerStreamer | None
) -> Callable[[int, int], KnowledgeCache]:
    """Makes caches of so many device blocks and host bytes."""
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
