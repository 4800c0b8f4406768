"""Identity of an engine's KV: all inputs of a chunk's bytes.

vLLM's keys are digests of tokens alone; `note_model` adds facts that only a connector's configuration has. Not covered:
LoRA adapters or weights replaced under the same path in a running engine.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ragorder.adapters.vllm_tiers.versions import vllm_version
from ragorder.adapters.vllm_tiers.weights import MEMORY, WeightDigests

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["disk_identity", "model_facts", "note_model", "this_machine"]

_NOTE = "ragorder_model"
_FORMAT = 2
_IN_FILES = frozenset({"revision", "draft", "downloads"})
# Position encodings that depend on the longest prompt.
_LENGTH_MATTERS = ('"longrope"', '"dynamic"', '"su"')
# Options of vLLM's model configuration that are not in the model's own.
_CHOICES = ("quantization", "dtype", "model_impl", "disable_sliding_window", "override_attention_dtype")


def note_model(vllm_config: Any) -> None:
    """Add facts of vLLM's whole configuration to `kv_connector_extra_config`. Never raises."""
    vllm_config.kv_transfer_config.kv_connector_extra_config[_NOTE] = model_facts(vllm_config)


def model_facts(vllm_config: Any) -> dict[str, Any]:
    model = vllm_config.model_config
    load = getattr(vllm_config, "load_config", None)
    config = _as_json(getattr(model, "hf_config", None))
    noted: dict[str, Any] = {
        "revision": getattr(model, "revision", None),
        # Their path, if it is not the model's folder.
        "weights": getattr(model, "model_weights", None),
        "load_format": str(getattr(load, "load_format", None)),
        "loader": str(getattr(load, "model_loader_extra_config", None)),
        "downloads": getattr(load, "download_dir", None),
        # The attention backend decides the layout of a block.
        "attention": _hash_of(getattr(vllm_config, "attention_config", None)),
        **{name: str(getattr(model, name, None)) for name in _CHOICES},
        # With overrides from the command line, which may change the position encoding.
        "config": sha256(config.encode()).hexdigest(),
    }
    if any(name in config for name in _LENGTH_MATTERS):
        noted["max_model_len"] = model.max_model_len
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        noted["draft"] = {"name": draft.model, "revision": getattr(draft, "revision", None)}
    return noted


def disk_identity(spec: OffloadingSpec, chunk_bytes: int, folder: Path | None = None) -> str:
    """Return a digest that is equal only for engines with interchangeable chunks. Caches digests of weights in
    `folder`. Raises UnknownWeightsError, OSError."""
    config = spec.config
    parallel = config.parallel
    noted = config.extra_config.get(_NOTE) or {}
    draft, dummy = noted.get("draft"), noted.get("load_format") == "dummy"
    hub = noted.get("downloads") and Path(noted["downloads"])
    weights = WeightDigests(folder and folder / MEMORY)
    facts = {
        "format": _FORMAT,
        "vllm": vllm_version(),
        "machine": this_machine(),
        # The seed of every chain of block hashes.
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "model": weights.of(config.model.name, noted.get("revision"), dummy=dummy, hub=hub),
        "draft": draft and weights.of(draft["name"], draft["revision"], dummy=dummy, hub=hub),
        "noted": {name: value for name, value in noted.items() if name not in _IN_FILES},
        "dtype": config.model.dtype,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "worker_bytes_per_block": config.worker_kv_bytes_per_block,
        "parallel": [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size],
        "layout": [config.kv_cache_layout, config.replicated_layout, config.canonical_layout],
    }
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _as_json(config: Any) -> str:
    try:
        return json.dumps(config.to_dict(), sort_keys=True, default=str)
    except Exception:
        # A configuration that cannot be serialised equals no other.
        return f"{type(config)} {uuid4()}"


def _hash_of(config: Any) -> str | None:
    if config is None:
        return None
    try:
        return str(config.compute_hash())
    except Exception:
        return str(uuid4())


def this_machine() -> Mapping[str, str]:
    from vllm.platforms import current_platform

    try:
        device = str(current_platform.get_device_name())
    except Exception:
        device = ""
    facts = {"platform": str(current_platform.device_type), "device": device, "processor": platform.machine()}
    if current_platform.is_cpu():
        facts["processor"] = _processor() or facts["processor"]
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    wanted = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return blake2b("\n".join(sorted(set(wanted))).encode(), digest_size=8).hexdigest()
