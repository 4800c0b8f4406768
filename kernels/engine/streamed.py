"""Models whose decoder layers stream within a memory budget (RAGDoll 4.2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import GenerationConfig

from ragorder.kernels.engine.budgeted import StreamedModel, plan_streamed
from ragorder.kernels.engine.loading import (
    ModelLoadError,
    check_loaded,
    first_line,
    load_config,
    pick_device,
    progress_on_terminals,
)
from ragorder.kernels.engine.support import UnsupportedModelError, check_model
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.offload.checkpoint import Checkpoint, CheckpointError, LayerReadError
from ragorder.kernels.offload.footprint import decoder_layers, footprint, skeleton
from ragorder.kernels.offload.layout import CheckpointMap
from ragorder.kernels.offload.store import LayerStore, Source
from ragorder.kernels.offload.stream import LayerStreamer

__all__ = ["load_streamed"]

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def load_streamed(
    name: str | Path, settings: EngineSettings, *, source: Callable[[Checkpoint], Source] | None = None
) -> StreamedModel:
    """A causal language model whose weights outside the decoder layers are in memory. `source`: another reader of the
    layers than the checkpoint.

    Raises BudgetError before anything is read, ModelLoadError, UnsupportedModelError for weights that cannot be
    streamed, MemoryError, and ValueError for an absent device.
    """
    device = pick_device(settings.device)
    config = load_config(name)
    _check_quantised(name, config)
    try:
        checkpoint = Checkpoint(_folder_of(name))
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
    size = footprint(config, dtype)
    plan_streamed(empty, settings.model_copy(update={"device": str(device)}), size)
    prefix, layers = decoder_layers(empty)
    found = CheckpointMap(empty, prefix, layers, checkpoint)
    weights = {each: checkpoint.tensor(each) for each in found.rest}
    for number, layer in enumerate(layers):
        # In no memory: the streamer gives layers their weights.
        weights |= {
            f"{prefix}.{number}.{each}": torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            for each, parameter in layer.named_parameters()
        }
    kind = type(empty)
    del empty, layers
    try:
        with progress_on_terminals():
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


def _folder_of(name: str | Path) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=list(_WEIGHTS)))
    except Exception as error:
        raise ModelLoadError(f"{name}: its weights cannot be downloaded from the Hub: {first_line(error)}") from error


def _check_quantised(name: str | Path, config: Any) -> None:
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        facts = quantised if isinstance(quantised, dict) else vars(quantised)
        method = str(getattr(facts.get("quant_method"), "value", facts.get("quant_method", "unknown")))
        raise UnsupportedModelError(
            f"{name} cannot be streamed: its weights are quantised ({method}), and what its layers compute with is "
            "made from them when they are loaded; leave device_bytes out, or give the model before it was quantised"
        )


def _dtype_of(config: Any, checkpoint: Checkpoint, settings: EngineSettings) -> torch.dtype:
    """As transformers chooses it with dtype="auto"."""
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
