"""A model with streamed weights, a throttled source of them, and times of its steps."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Self

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from ragorder.benchmarks.doll.streaming.cells import SLOTS, StreamingCell
from ragorder.kernels.engine.budgeted import load_streamed
from ragorder.kernels.engine_settings import EngineSettings
from ragorder.kernels.offload import LayerTiers
from ragorder.kernels.offload.checkpoint import Checkpoint, TensorEntry
from ragorder.kernels.offload.feeder import Feeder, allocate
from ragorder.kernels.offload.model_memory import skeleton

VOCABULARY = 1024
_HEAD = 64


def write_model(folder: Path, cell: StreamingCell, seed: int) -> Path:
    heads = cell.hidden_size // _HEAD
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=cell.hidden_size,
        intermediate_size=cell.intermediate_size,
        num_hidden_layers=cell.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        head_dim=_HEAD,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype="float32",
    )
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, Any] = {name: tensor.shape for name, tensor in skeleton(config).state_dict().items()}
    files: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    index = {name: file for file, names in files.items() for name in names}
    for file, names in files.items():
        save_file(_weights(names, generator), folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}), "utf-8")
    return folder


def _weights(shapes: Mapping[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }


class TokenBucket:
    """Bytes pass at `bytes_s`, one reader's after another's; one that is late by at most `burst_s` loses nothing."""

    def __init__(self, bytes_s: float, burst_s: float = 0.0) -> None:
        self.bytes_s = bytes_s
        self.burst_s = burst_s
        self.free_s = 0.0
        self._lock = threading.Lock()

    def take(self, nbytes: float) -> float:
        """Return when the bytes will have passed, by `time.perf_counter`."""
        with self._lock:
            self.free_s = max(time.perf_counter() - self.burst_s, self.free_s) + nbytes / self.bytes_s
            return self.free_s


class ThrottledSource:
    """A checkpoint read through a token bucket, at `bytes_s`. With `jitter` each pass over a layer takes up to that
    share more or less, by a number that depends on the pass alone: all policies see the same. `cold`: the system's copy
    of what was read is dropped at once."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        bytes_s: float,
        jitter: float,
        seed: int,
        *,
        cold: bool = True,
        burst_s: float = 0.0,
    ) -> None:
        self._checkpoint = checkpoint
        self._bucket = TokenBucket(bytes_s, burst_s)
        self._jitter = jitter
        self._seed = seed
        self._cold = cold
        self._reads: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """The same numbers again."""
        with self._lock:
            self._reads.clear()

    def read(self, entry: TensorEntry, start: int, into: memoryview) -> None:
        layer = ".".join(entry.name.split(".")[:3])
        with self._lock:
            key = (entry.name, start)
            count = self._reads[key] = self._reads.get(key, 0) + 1
            share = 1 + self._jitter * Random(f"{self._seed} {layer} {count}").uniform(-1, 1)
            until_s = self._bucket.take(share * len(into))
        self._checkpoint.read(entry, start, into)
        if self._cold:
            self._checkpoint.forget_pages(entry, start, len(into))
        time.sleep(max(0.0, until_s - time.perf_counter()))


_CPU = torch.device("cpu")
# Tokens of steps by which the time of others is estimated, and the most of a step.
_TRIED = (16, 128)
_MOST_TOKENS = 4096
_REPEATS = 3
# More than any model needs: the slots are set by policy.
_PLENTY = 1 << 50


class Bench:
    """A model that streams from a throttled source. One thread computes at most all processors but one, which reads."""

    def __init__(self, folder: Path, cell: StreamingCell, seed: int) -> None:
        self._cell = cell
        self._seed = seed
        self._sources: list[ThrottledSource] = []
        _write_out(folder)
        self._threads = torch.get_num_threads()
        torch.set_num_threads(max(1, min(self._threads, (os.cpu_count() or 2) - 1)))
        settings = EngineSettings(device_bytes=_PLENTY, host_bytes=0, device="cpu", verify=False)
        streamed = load_streamed(folder, settings, source=self._throttled)
        self._model, self._streamer = streamed.model.eval(), streamed.streamer
        self._pauses = _Pauses(self._model.model.layers, seed)
        self._ids = torch.zeros(1, 1, dtype=torch.int64)
        self._logits: dict[str, torch.Tensor] = {}
        self._facts: dict[str, list[dict[str, float]]] = {}
        self._slots: dict[str, int] = {}
        self.stream_s = self.compute_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)
        self._streamer.close()

    @property
    def tokens(self) -> int:
        return int(self._ids.shape[1])

    def calibrate(self) -> None:
        """Choose a step whose computing takes as long as its reading, and time both alone."""
        cell, layers = self._cell, self._cell.layers
        # With all layers in memory nothing else is read.
        self._streamer.move(LayerTiers.spread(layers, layers))
        feeder, buffer = Feeder(self._streamer.store, _CPU), allocate(self._streamer.store.slot_bytes, _CPU)
        times = []
        self._sources[0].begin()
        for _ in range(_REPEATS):
            before_s = time.perf_counter()
            for layer in range(layers):
                feeder.read(layer, buffer)
            times.append(time.perf_counter() - before_s)
        feeder.close()
        self.stream_s = median(times)
        few, many = (self._computing(tokens) for tokens in _TRIED)
        # The share of a layer's time that is pauses does not depend on the step.
        a_token_s = max(1e-9, (many - few) / (_TRIED[1] - _TRIED[0]))
        wanted_s = self.stream_s * (1 - cell.jitter)
        tokens = round(_TRIED[0] + (wanted_s - few) / a_token_s)
        self._computing(max(1, min(tokens, _MOST_TOKENS)))
        self._pauses.layer_s = cell.jitter * self.stream_s / layers
        self.compute_s = self._computing(self.tokens)
        self._streamer.move(LayerTiers.spread(layers, 0))

    def steps(self, policy: str, count: int, advance: Callable[[], None]) -> list[float]:
        """Return seconds of `count` steps, after one that is not counted."""
        self._slots[policy] = self._streamer.resize(SLOTS[policy] or self._cell.budget_layers)
        self._sources[0].begin()
        self._pauses.begin()
        self._step()
        found = []
        for _ in range(count):
            before, before_s = self._streamer.stats, time.perf_counter()
            logits = self._step()
            found.append(time.perf_counter() - before_s)
            after = self._streamer.stats
            self._logits.setdefault(policy, logits)
            self._facts.setdefault(policy, []).append(
                {name: getattr(after, name) - getattr(before, name) for name in ("bytes", "hits", "waits", "waits_s")}
            )
            advance()
        return found

    def facts(self, policy: str) -> dict[str, Any]:
        each = self._facts[policy]
        first = next(iter(self._logits.values()))
        return {
            "stream_s": round(self.stream_s, 5),
            "compute_s": round(self.compute_s, 5),
            "tokens": self.tokens,
            "slots": self._slots[policy],
            "threads": torch.get_num_threads(),
            "equal": bool(torch.equal(self._logits[policy], first)),
        } | {name: sum(line[name] for line in each) / len(each) for name in each[0]}

    def _throttled(self, checkpoint: Checkpoint) -> ThrottledSource:
        cell = self._cell
        self._sources.append(ThrottledSource(checkpoint, cell.gigabytes_s * 1e9, cell.jitter, self._seed))
        return self._sources[-1]

    def _computing(self, tokens: int) -> float:
        """Return seconds of a step of `tokens` on weights that stay."""
        random = Random(self._seed)
        self._ids = torch.tensor([[random.randrange(VOCABULARY) for _ in range(tokens)]])
        self._pauses.begin()
        self._step()
        times = []
        for _ in range(_REPEATS):
            before_s = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - before_s)
        return median(times)

    def _step(self) -> torch.Tensor:
        with self._streamer.step(self.tokens), torch.inference_mode():
            logits: torch.Tensor = self._model(input_ids=self._ids, use_cache=False).logits[0, -1].clone()
        return logits


class _Pauses:
    """Layers that take longer, each time by another share: up to twice `layer_s` seconds, the same for all policies."""

    def __init__(self, layers: Any, seed: int) -> None:
        self.layer_s = 0.0
        self._seed = seed
        self._random = Random(seed)
        for layer in layers:
            # Before its weights are given back.
            layer.register_forward_hook(self._pause, prepend=True)

    def begin(self) -> None:
        self._random = Random(self._seed)

    def _pause(self, *_: Any) -> None:
        time.sleep(self._random.uniform(0, 2 * self.layer_s))


def _write_out(folder: Path) -> None:
    """Pages that are not on the disk cannot be dropped."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
