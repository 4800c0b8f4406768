"""Prefill and load times, measured before serving."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

import ragorder
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.models.batch import Piece, pack
from ragorder.kernels.models.identity import ORIGIN, device_name
from ragorder.kernels.models.model import PatchedModel
from ragorder.kernels.paging import BlockPool, KVShape, make_transfers
from ragorder.kernels.profile_cache import ProfileCache, processor_name, profile_key
from ragorder.kernels.short_profile import LONGEST_TOKENS, LoadTimes, measure_short_loads, measure_short_profile
from ragorder.kernels.store import ChunkStore, StoreRefusedError
from ragorder.trie.profile import LINEAR, PrefillProfile

# Largest measured load.
_TOKENS = 1_024
_BYTES = 64 << 20
_KEY = b"load"


_logger = logging.getLogger("ragorder.profile")

# Prefills' share of the budget.
_PREFILLS_SHARE = 0.8


def engine_profile(model: PatchedModel, settings: EngineSettings, blocks: int) -> PrefillProfile:
    """Return the model's profile on this machine, cached or measured; after a failure LINEAR, with a warning."""
    longest = min(blocks * settings.block_size, model.longest or LONGEST_TOKENS, LONGEST_TOKENS)

    def measure(identity: Mapping[str, Any]) -> PrefillProfile:
        budget_s = settings.profile_budget_s
        _logger.info(
            "measuring prefill times of %s, once for this model and machine (at most %g s)", model.name, budget_s
        )
        begun_s = time.monotonic()
        try:
            profile = measure_short_profile(
                _PrefillTimer(model, longest, settings.max_batch_tokens),
                longest_tokens=longest,
                block_size=settings.block_size,
                budget_s=_PREFILLS_SHARE * budget_s,
                facts={
                    "engine": f"ragorder {identity['versions']['ragorder']}",
                    "model": model.name,
                    "date": datetime.now(UTC).isoformat(timespec="seconds"),
                    "measured": "one forward in the engine's process, in seconds: median of the repeats",
                    "block_size": settings.block_size,
                    "longest_tokens": longest,
                    "budget_s": budget_s,
                    "identity": identity,
                },
            )
            return _with_loads(profile, model, settings, begun_s + budget_s - time.monotonic())
        finally:
            if model.device.type == "cuda":
                # The engine's own pool was sized before this one took memory.
                torch.cuda.empty_cache()

    try:
        identity = _profile_identity(model, settings, longest)
        return ProfileCache().find_or_measure(profile_key(identity), lambda: measure(identity))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        _logger.warning("prefill times cannot be measured (%s): every token counts the same", why)
        return LINEAR


def _with_loads(
    profile: PrefillProfile, model: PatchedModel, settings: EngineSettings, budget_s: float
) -> PrefillProfile:
    shape = model.shape
    tokens = min(profile.facts["longest_tokens"], _TOKENS)
    blocks = max(1, min(shape.blocks_for(tokens), _BYTES // shape.block_bytes))
    with _tier_loads(shape, blocks, model.device, settings.disk_path) as loads:
        return measure_short_loads(profile, loads, blocks * shape.block_size, budget_s=budget_s)


def _profile_identity(model: PatchedModel, settings: EngineSettings, longest: int) -> dict[str, Any]:
    config = {name: entry for name, entry in model.model.config.to_dict().items() if name not in ORIGIN}
    weights = Counter[str]()
    for parameter in model.model.parameters():
        weights[str(parameter.dtype)] += parameter.numel()
    on_cpu = model.device.type == "cpu"
    return {
        "engine": "ragorder",
        "versions": {
            "ragorder": ragorder.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": type(model.model).__name__,
        "config": sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "weights": dict(sorted(weights.items())),
        "kv": [str(model.shape.dtype), model.shape.block_size],
        "device": processor_name() if on_cpu else device_name(model.device),
        "threads": torch.get_num_threads() if on_cpu else None,
        "precision": torch.get_float32_matmul_precision(),
        "longest_tokens": longest,
        "max_batch_tokens": settings.max_batch_tokens,
        "disk": None if settings.disk_path is None else str(settings.disk_path.absolute()),
    } | ({} if settings.device_bytes is None else {"streamed": [settings.device_bytes, settings.host_bytes]})


@contextmanager
def _tier_loads(shape: KVShape, blocks: int, device: torch.device, disk: Path | None) -> Iterator[LoadTimes]:
    pinned = device.type == "cuda"
    on_device, host = BlockPool(shape, blocks, device), BlockPool(shape, blocks, pinned=pinned)
    # Pages that were never written take no time to read.
    host.kv.fill_(1)
    places = range(blocks)
    with ExitStack() as stack:
        transfers = make_transfers(device)
        stack.callback(transfers.close)
        stored: list[tuple[Path, ChunkStore]] = []

        def from_host() -> float:
            before_s = time.perf_counter()
            transfers.start(host, places, on_device, places).wait()
            return time.perf_counter() - before_s

        def from_disk() -> float:
            assert disk is not None
            if not stored:
                stored.append(stack.enter_context(_stored_chunk(disk, host)))
            [(folder, store)] = stored
            _forget_pages(folder)
            before_s = time.perf_counter()
            staged = BlockPool(shape, blocks, pinned=pinned)
            if not store.read(_KEY, memoryview(staged.rows())):
                raise OSError("the written chunk cannot be read")
            transfers.start(staged, places, on_device, places).wait()
            return time.perf_counter() - before_s

        yield {"host": from_host} if disk is None else {"host": from_host, "disk": from_disk}


@contextmanager
def _stored_chunk(disk: Path, content: BlockPool) -> Iterator[tuple[Path, ChunkStore]]:
    beside = next(folder for folder in (disk, *disk.parents) if folder.is_dir())
    with TemporaryDirectory(prefix=".ragorder-", dir=beside) as name:
        try:
            store = ChunkStore(Path(name), 2 * content.capacity_bytes + (1 << 20), "load times")
        except StoreRefusedError as refused:
            raise OSError(str(refused)) from refused
        with closing(store):
            if not store.write(_KEY, memoryview(content.rows())):
                raise OSError("a chunk cannot be written to the disk")
            yield Path(name), store


def _forget_pages(folder: Path) -> None:
    # As if the files had been written long ago.
    for path in folder.rglob("*"):
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb") as file:
                # Only clean pages are dropped.
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _PrefillTimer:
    def __init__(self, model: PatchedModel, longest: int, max_batch_tokens: int) -> None:
        self._model = model
        self._most = max_batch_tokens
        # It stays zeros: times do not depend on contents.
        self._pool = BlockPool(model.shape, model.shape.blocks_for(longest), model.device)
        self._table = self._pool.allocate(self._pool.blocks)
        drawn = torch.randint(0, model.vocabulary, (longest,), generator=torch.Generator().manual_seed(0))
        self._token_ids: list[int] = drawn.tolist()

    def __call__(self, cached_tokens: int, new_tokens: int) -> float:
        model, end = self._model, cached_tokens + new_tokens
        before = time.perf_counter()
        for start in range(cached_tokens, end, self._most):
            stop = min(start + self._most, end)
            piece = Piece(self._token_ids[start:stop], start, self._table, stop == end)
            logits = model.forward(*pack([piece], self._pool))
        # Reading the choice waits for the device.
        logits.argmax().item()
        return time.perf_counter() - before
