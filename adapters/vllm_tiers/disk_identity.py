"""Whose KV this is: everything that makes equal keys stand for equal bytes.

vLLM's keys are digests of tokens, and know nothing of the model. What an offloading spec is told names the model, its
layout and its parallelism, not its weights: a folder is told from another by its files, a model of the Hugging Face hub
by its commit. `note_model` lets a connector, which knows the whole configuration, tell more.

What nobody can see from here: an adapter (LoRA) whose files are replaced under the same path, and weights that are
replaced in a running engine. Take another folder then.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragorder.adapters.vllm_tiers.versions import vllm_version

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

__all__ = ["UnknownWeightsError", "disk_identity", "note_model", "weights_of"]

_NOTE = "ragorder_model"
_TOKENS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "chat_template", "generation_config")
_NOT_THE_MODEL = (".", "README", "LICENSE", *_TOKENS)
_NOT_WEIGHTS = frozenset({".md", ".txt", ".jinja", ".png", ".jpg"})
# Ways to encode positions that depend on how long a prompt may be.
_LENGTH_MATTERS = ('"longrope"', '"dynamic"', '"su"')
_SAMPLES = 16
_SAMPLE_BYTES = 4096


class UnknownWeightsError(Exception):
    """Nobody can tell which weights the engine has."""


def note_model(vllm_config: Any) -> None:
    """Leave in `kv_connector_extra_config` what only vLLM's whole configuration tells; for a connector, before it makes
    its offloading spec. Never raises."""
    model = vllm_config.model_config
    config = _as_json(getattr(model, "hf_config", None))
    noted: dict[str, Any] = {
        "revision": getattr(model, "revision", None),
        # Where they are, if not in the model's folder.
        "weights": getattr(model, "model_weights", None),
        "quantization": str(getattr(model, "quantization", None)),
        "load_format": str(getattr(getattr(vllm_config, "load_config", None), "load_format", None)),
        "dtype": str(getattr(model, "dtype", None)),
        # As it was overridden on the command line, too: positions may be encoded in another way.
        "config": sha256(config.encode()).hexdigest(),
    }
    if any(name in config for name in _LENGTH_MATTERS):
        noted["max_model_len"] = model.max_model_len
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    if draft is not None:
        noted["draft"] = {"name": draft.model, "revision": getattr(draft, "revision", None)}
    vllm_config.kv_transfer_config.kv_connector_extra_config[_NOTE] = noted


def disk_identity(spec: OffloadingSpec, chunk_bytes: int) -> str:
    """A digest that engines have in common whose chunks are interchangeable, and no others.

    Reads some KB of each file of the weights. Raises UnknownWeightsError if the weights cannot be told.
    """
    config = spec.config
    parallel = config.parallel
    noted = config.extra_config.get(_NOTE) or {}
    draft, dummy = noted.get("draft"), noted.get("load_format") == "dummy"
    facts = {
        "vllm": vllm_version(),
        "machine": _machine(),
        # The beginning of every chain of block hashes.
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
        "model": weights_of(config.model.name, noted.get("revision"), dummy=dummy),
        "draft": draft and weights_of(draft["name"], draft["revision"], dummy=dummy),
        "noted": {name: value for name, value in noted.items() if name not in ("revision", "draft")},
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


def weights_of(model: str, revision: str | None = None, *, dummy: bool = False) -> str:
    """What tells these weights from others. `model` is a folder or a file, or a name on the hub, and `revision` its
    commit there; `dummy` weights are made from the configuration.

    Raises UnknownWeightsError for a model that is none of these, has no weights, or several commits here.
    """
    path = Path(model)
    if path.is_file():
        return "file " + _fingerprint([path])
    if path.is_dir():
        files = [file for file in path.iterdir() if file.is_file() and not _is_another_thing(file)]
        if dummy or any(file.suffix != ".json" for file in files):
            return "files " + _fingerprint(files)
        raise UnknownWeightsError(f"which weights {model} has cannot be told: there are none in it")
    if revision is not None and len(revision) == 40:
        return f"commit {revision} of {model}"
    commits = _cached_commits(model)
    if len(commits) == 1:
        return f"commit {commits[0]} of {model}"
    found = f"{len(commits)} revisions of it are" if commits else "it is not"
    raise UnknownWeightsError(
        f"which weights {model} has cannot be told ({found} in the cache of the Hugging Face hub): give vLLM the "
        "folder of the model, or --revision with a whole commit"
    )


def _as_json(config: Any) -> str:
    try:
        return json.dumps(config.to_dict(), sort_keys=True, default=str)
    except Exception:
        return str(type(config))


def _is_another_thing(file: Path) -> bool:
    return file.name.startswith(_NOT_THE_MODEL) or file.suffix in _NOT_WEIGHTS


def _fingerprint(files: Iterable[Path]) -> str:
    """Names and sizes, and of each file either the digest that the hub's cache keeps it under, or samples and the time
    of its last change. Files that were copied since are others, then, and their chunks are computed anew."""
    found = blake2b(digest_size=16)
    for path in sorted(files, key=lambda path: path.name):
        real = path.resolve()
        status = real.stat()
        found.update(f"{path.name}\n{status.st_size}\n".encode())
        if real.parent.name == "blobs":
            found.update(real.name.encode())
        elif path.suffix == ".json":
            found.update(real.read_bytes())
        else:
            found.update(str(status.st_mtime_ns).encode())
            for sample in _samples(real, status.st_size):
                found.update(sample)
    return found.hexdigest()


def _samples(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        for number in range(_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)


def _cached_commits(model: str) -> list[str]:
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return []
    snapshots = Path(HF_HUB_CACHE) / f"models--{model.replace('/', '--')}" / "snapshots"
    return sorted(path.name for path in snapshots.iterdir()) if snapshots.is_dir() else []


def _machine() -> Mapping[str, str]:
    """Attention kernels lay KV out as the device likes it."""
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
    """Which instructions a CPU has decides which layout vLLM takes."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return ""
    wanted = [line for line in lines if line.startswith(("model name", "flags", "Features"))]
    return blake2b("\n".join(sorted(set(wanted))).encode(), digest_size=8).hexdigest()
