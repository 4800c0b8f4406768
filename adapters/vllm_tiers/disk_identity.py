"""Identity of an engine's KV and weights: inputs of a chunk's bytes.

vLLM's keys are digests of tokens alone. Not covered: LoRA adapters or weights replaced under the same path in a running
engine.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ragorder.adapters.vllm_tiers.versions import vllm_version
from ragorder.common.jsonl import decode
from ragorder.errors import RagorderError
from ragorder.kernels.store.hashing import digest_in_pieces, digest_threads

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

MEMORY = "weights.json"
_TOKENS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "chat_template", "generation_config")
_NOT_THE_MODEL = (".", "README", "LICENSE", *_TOKENS)
_NOT_WEIGHTS = frozenset({".md", ".txt", ".jinja", ".png", ".jpg"})
# A file changed this shortly before it was read may change again within the same time stamp.
_SETTLED_NS = 2 * 10**9
_MAX_MEMORY_BYTES = 1 << 20
_NOTE = "ragorder_model"
_FORMAT = 2
_IN_FILES = frozenset({"revision", "draft", "downloads"})
# Position encodings that depend on the longest prompt.
_LENGTH_MATTERS = ('"longrope"', '"dynamic"', '"su"')
# Options of vLLM's model configuration that are not in the model's own.
_CHOICES = ("quantization", "dtype", "model_impl", "disable_sliding_window", "override_attention_dtype")


class UnknownWeightsError(RagorderError): ...


class WeightDigests:
    """Digests of models' whole files, cached in `memory` by inode, size, mtime and ctime, unless other users can write
    it."""

    def __init__(self, memory: Path | None = None) -> None:
        self._memory = memory
        self._known = _read(memory) if memory is not None else {}

    def of(self, model: str, revision: str | None = None, *, dummy: bool = False, hub: Path | None = None) -> str:
        """Digest a folder, a file, or a name on the Hub with its commit. Raises UnknownWeightsError, OSError."""
        path = Path(model)
        if path.is_file():
            return "file " + self._digest([path])
        if path.is_dir():
            files = _files(path)
            if dummy or any(file.suffix != ".json" for file in files):
                return "files " + self._digest(files)
            raise UnknownWeightsError(f"the weights of {model} cannot be identified: the folder has none")
        commits = _commits(model, hub)
        if revision is None or len(revision) != 40:
            if len(commits) != 1:
                found = f"{len(commits)} revisions of it are" if commits else "it is not"
                raise UnknownWeightsError(
                    f"the weights of {model} cannot be identified ({found} in the cache of the Hugging Face hub): give "
                    "vLLM the folder of the model, or --revision with a whole commit"
                )
            [revision] = commits
        # The commit identifies the download, the files any change since then.
        files = _files(commits[revision]) if revision in commits else []
        return f"commit {revision} of {model}, files {self._digest(files)}"

    def _digest(self, files: Iterable[Path]) -> str:
        found = sha256()
        with digest_threads() as threads:
            for path in sorted(files, key=lambda path: path.name):
                found.update(f"{path.name}\n{self._file(path.resolve(), threads)}\n".encode("utf-8", "surrogateescape"))
        self._remember()
        return found.hexdigest()

    def _file(self, path: Path, threads: Executor) -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            facts = _facts(os.fstat(descriptor))
            known = self._known.get(str(path))
            if known is not None and known[:-1] == facts:
                return str(known[-1])
            began = time.time_ns()
            digest = digest_in_pieces(
                lambda start, end: _read_piece(descriptor, start, end), os.fstat(descriptor).st_size, threads
            )
            if _facts(os.fstat(descriptor)) != facts:
                raise UnknownWeightsError(
                    f"the weights in {path} cannot be identified: the file changes while it is read"
                )
        finally:
            os.close(descriptor)
        if began - max(facts[-2:]) > _SETTLED_NS:
            self._known[str(path)] = [*facts, digest]
        return digest

    def _remember(self) -> None:
        if self._memory is None:
            return
        with suppress(OSError):
            self._memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._memory.with_name(f"{self._memory.name}.{os.getpid()}.tmp")
            with suppress(FileNotFoundError):
                temporary.unlink()
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                json.dump(self._known, file)
            temporary.replace(self._memory)


def _files(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.iterdir()
        if file.is_file() and not file.name.startswith(_NOT_THE_MODEL) and file.suffix not in _NOT_WEIGHTS
    ]


def _facts(status: os.stat_result) -> list[int]:
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _read_piece(descriptor: int, start: int, end: int) -> bytes:
    read = os.pread(descriptor, end - start, start)
    while len(read) < end - start:
        more = os.pread(descriptor, end - start - len(read), start + len(read))
        if not more:
            raise UnknownWeightsError("the model's weights cannot be identified: a file shrinks while it is read")
        read += more
    return read


def _read(memory: Path) -> dict[str, list[int | str]]:
    try:
        descriptor = os.open(memory, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return {}
        found = decode(os.read(descriptor, _MAX_MEMORY_BYTES))
    except (OSError, ValueError):
        return {}
    finally:
        os.close(descriptor)
    if not isinstance(found, dict):
        return {}
    return {path: facts for path, facts in found.items() if isinstance(facts, list) and len(facts) == 6}


def _commits(model: str, hub: Path | None) -> dict[str, Path]:
    if hub is None:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE
        except ImportError:
            return {}
        hub = Path(HF_HUB_CACHE)
    snapshots = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    return {path.name: path for path in sorted(snapshots.iterdir())} if snapshots.is_dir() else {}


def note_model(vllm_config: Any) -> None:
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
    """Return a digest equal only for interchangeable chunks. Raises UnknownWeightsError, OSError."""
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
